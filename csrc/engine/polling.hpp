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

/// Called on the waiting thread while the engine works on another; true asks for an end. This is how
/// a caller looks for Ctrl-C or reports progress without any engine callback entering Python.
using Poll = std::function<bool()>;

/// Runs `work(stop)` on a thread of its own and calls `poll` here about every 50 ms until it ends;
/// `stop` turns true once `poll` has asked for an end. What `work` or `poll` throws is thrown here.
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
        // The thread is being ended (Python does so when it goes down); this must go on.
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
