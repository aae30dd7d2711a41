#pragma once

#include <unistd.h>

#include <mutex>

#include "engine/error.hpp"
#include "engine/lifetime.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

/// Held while a thread uses a context. Throws Busy when another thread does, and Unsupported in a
/// forked child, where the engine's threads are gone and every computation would hang.
class ContextLock {
 public:
  ContextLock(std::mutex& mutex, const Model& model) : lock_(mutex, std::try_to_lock) {
    if (!lock_) throw Busy("another thread is using this context; give each thread a context of its own");
    if (model.process() != static_cast<int32_t>(getpid())) {
      throw Unsupported("the model was loaded before a fork; load it in this process");
    }
  }

 private:
  Activity activity_;
  std::unique_lock<std::mutex> lock_;
};

}  // namespace llamatap
