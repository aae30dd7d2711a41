#pragma once

#include <mutex>

#include "engine/error.hpp"

namespace llamatap {

/// Locks a mutex without waiting. Throws Busy with `message` when another thread holds it.
inline std::unique_lock<std::mutex> try_hold(std::mutex& mutex, const char* message) {
  std::unique_lock<std::mutex> held(mutex, std::try_to_lock);
  if (!held) throw Busy(message);
  return held;
}

}  // namespace llamatap
