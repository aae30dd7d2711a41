#pragma once

#include <unistd.h>

#include <mutex>

#include "engine/error.hpp"
#include "engine/lifetime.hpp"
#include "engine/model/model.hpp"
#include "engine/try_hold.hpp"

namespace llamatap {

/// Lock of a context. Throws Busy if another thread uses it, and Unsupported in a forked child: without the
/// engine's threads, every computation would hang.
class ContextLock {
 public:
  ContextLock(std::mutex& mutex, const Model& model)
      : lock_(
            try_hold(mutex, "another thread is using this context; give each thread a context of its own")) {
    if (model.process() != static_cast<int32_t>(getpid())) {
      throw Unsupported("the model was loaded before a fork; load it in this process");
    }
  }

 private:
  Activity activity_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace llamatap
