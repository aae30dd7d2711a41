#pragma once

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "engine/error.hpp"

namespace llamatap {

/// Counts running engine calls, so that the process can exit safely: the engine's static objects are
/// destroyed at exit, and a thread still computing would crash. end() is called first; then running work
/// stops at its next node and new work is refused.
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

  /// Whether another thread has called end().
  static bool ended_elsewhere() { return ending() && std::this_thread::get_id() != ender(); }

  /// Held by a thread while it returns to the interpreter. After another thread's end() it waits here until
  /// the process ends; end() waits for the threads that returned before it.
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

  /// Stops all work and waits until nothing runs, 10 seconds at most.
  static void end() {
    ender() = std::this_thread::get_id();
    flag() = true;
    // A forked child does not have the threads that were running.
    if (getpid() != owner()) return;
    for (int i = 0; i < 10000 && running() + returning() > 0; ++i)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }

  /// The process whose threads are counted: the first one to call this.
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
