#pragma once

#include <unistd.h>

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

  static bool ending() { return flag(); }

  /// Whether another thread has announced the end.
  static bool ended_elsewhere() { return ending() && std::this_thread::get_id() != ender(); }

  /// Held by a thread that goes back to the interpreter. Once another thread has announced the end, it waits
  /// here for that of the process instead; and the end waits for those that came before it was announced.
  class Return {
   public:
    Return() {
      ++returning();
      if (!ended_elsewhere()) return;
      --returning();
      while (true) std::this_thread::sleep_for(std::chrono::seconds(1));
    }
    ~Return() { --returning(); }
    Return(const Return&) = delete;
    Return& operator=(const Return&) = delete;
  };

  /// Announces the end and waits until nothing runs any more, ten seconds at most.
  static void end() {
    ender() = std::this_thread::get_id();
    flag() = true;
    // A forked child has none of the threads that were running.
    if (getpid() != owner()) return;
    for (int i = 0; i < 10000 && running() + returning() > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  /// The process whose threads are counted: the one that calls this first.
  static pid_t owner() {
    static const pid_t value = getpid();
    return value;
  }

 private:
  static std::atomic<bool>& flag() {
    static std::atomic<bool> value{false};
    return value;
  }
  static std::atomic<std::thread::id>& ender() {
    static std::atomic<std::thread::id> value;
    return value;
  }
  static std::atomic<int>& returning() {
    static std::atomic<int> value{0};
    return value;
  }
  static std::atomic<int>& running() {
    static std::atomic<int> value{0};
    return value;
  }
};

}  // namespace llamatap
