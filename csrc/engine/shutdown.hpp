#pragma once

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/error.hpp"

namespace llamatap {

/// The engine's static objects die when the process exits; a thread that still computes then would crash.
/// So the end is announced first: running work stops at its next node, new work is refused.
class Activity {
 public:
  Activity() {
    ++running();
    if (ending()) {
      --running();
      throw Closed("the interpreter is shutting down");
    }
  }
  ~Activity() { --running(); }
  Activity(const Activity&) = delete;
  Activity& operator=(const Activity&) = delete;

  static bool ending() { return flag().load(std::memory_order_relaxed); }

  /// Whether another thread has announced the end.
  static bool ended_elsewhere() { return ending() && std::this_thread::get_id() != ender(); }

  /// Announces the end and waits until nothing runs any more, ten seconds at most.
  static void end() {
    ender() = std::this_thread::get_id();
    flag() = true;
    for (int i = 0; i < 10000 && running() > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

 private:
  static std::atomic<bool>& flag() {
    static std::atomic<bool> value{false};
    return value;
  }
  static std::thread::id& ender() {
    static std::thread::id value;
    return value;
  }
  static std::atomic<int>& running() {
    static std::atomic<int> value{0};
    return value;
  }
};

}  // namespace llamatap
