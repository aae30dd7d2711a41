#include "draft/drafter.hpp"

#include "engine/error.hpp"

namespace llamatap {

std::unique_lock<std::mutex> Drafter::lock() {
  std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
  if (!held) throw Busy("another thread is using this drafter");
  return held;
}

}  // namespace llamatap
