#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <mutex>
#include <thread>

#ifdef __GLIBCXX__
#include <cxxabi.h>
#endif

namespace llamatap {

/// Called on the waiting thread while the engine works on another; returns true to stop. Used to check for
/// Ctrl-C and to report progress, so that no engine callback enters Python.
using Poll = std::function<bool()>;

/// Runs `work(stop)` on a new thread and calls `poll` on this one about every 50 ms until it ends; `stop`
/// becomes true when `poll` returns true. Rethrows exceptions of both.
template <typename Work>
void run_polling(Work&& work, const Poll& poll) {
  std::atomic<bool> stop{false};
  std::mutex mutex;
  std::condition_variable finished;
  bool done = false;
  std::exception_ptr work_error;
  std::exception_ptr poll_error;

  std::thread thread([&] {
    try {
      work(stop);
    } catch (...) {
      work_error = std::current_exception();
    }
    const std::lock_guard<std::mutex> lock(mutex);
    done = true;
    finished.notify_one();
  });
  {
    std::unique_lock<std::mutex> lock(mutex);
    while (!finished.wait_for(lock, std::chrono::milliseconds(50), [&] { return done; })) {
      if (stop) continue;
      lock.unlock();
      try {
        stop = poll();
#ifdef __GLIBCXX__
      } catch (abi::__forced_unwind&) {
        // Python unwinds the thread at shutdown; this exception must be rethrown.
        stop = true;
        thread.join();
        throw;
#endif
      } catch (...) {
        poll_error = std::current_exception();
        stop = true;
      }
      lock.lock();
    }
  }
  thread.join();
  if (poll_error) std::rethrow_exception(poll_error);
  if (work_error) std::rethrow_exception(work_error);
}

}  // namespace llamatap
