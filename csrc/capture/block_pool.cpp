#include "capture/block_pool.hpp"

#include <ggml-backend.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <map>
#include <utility>

#include "engine/lifetime.hpp"

namespace llamatap {

namespace {

constexpr size_t kPage = 4096;
// Pinned memory cannot be swapped out.
constexpr size_t kMostBytes = size_t{4} << 30;
constexpr size_t kShareOfMemory = 8;

size_t most_bytes() {
  const auto total =
      static_cast<size_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return std::min(kMostBytes, total / kShareOfMemory);
}

/// Memory of the host that a device copies to at full speed, without staging; memory of the process where the
/// device has none (`type` is null) or none is left.
std::unique_ptr<Block> pinned_block(ggml_backend_buffer_type_t type, size_t bytes) {
  ggml_backend_buffer_t buffer = type == nullptr ? nullptr : ggml_backend_buft_alloc_buffer(type, bytes);
  if (buffer == nullptr) return std::make_unique<Block>(bytes);
  auto* data = static_cast<std::byte*>(ggml_backend_buffer_get_base(buffer));
  return std::make_unique<Block>(data, bytes, [buffer](std::byte*) {
    // At exit the device's driver may be gone; a forked child never had it.
    if (!Activity::ending() && getpid() == Activity::owner()) ggml_backend_buffer_free(buffer);
  });
}

}  // namespace

std::shared_ptr<Block> BlockPool::take(size_t bytes) {
  const size_t wanted = (std::max(bytes, size_t{1}) + kPage - 1) / kPage * kPage;
  std::unique_ptr<Block> found;
  {
    const std::lock_guard<std::mutex> lock(mutex_);
    auto best = idle_.end();
    for (auto it = idle_.begin(); it != idle_.end(); ++it) {
      const size_t size = (*it)->bytes();
      if (size >= wanted && size / 2 <= wanted && (best == idle_.end() || size < (*best)->bytes())) best = it;
    }
    if (best != idle_.end()) {
      found = std::move(*best);
      idle_.erase(best);
      idle_bytes_ -= found->bytes();
    }
  }
  if (found == nullptr) found = allocate_(wanted);
  return {found.release(),
          [pool = shared_from_this()](Block* block) { pool->give_back(std::unique_ptr<Block>(block)); }};
}

size_t BlockPool::idle_bytes() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return idle_bytes_;
}

void BlockPool::give_back(std::unique_ptr<Block> block) {
  std::list<std::unique_ptr<Block>> dropped;  // freed without the lock
  // It would drive out all others.
  if (block->bytes() > most_bytes_) return;
  const std::lock_guard<std::mutex> lock(mutex_);
  idle_bytes_ += block->bytes();
  idle_.push_front(std::move(block));
  while (idle_bytes_ > most_bytes_) {
    idle_bytes_ -= idle_.back()->bytes();
    dropped.splice(dropped.end(), idle_, std::prev(idle_.end()));
  }
}

std::shared_ptr<Block> block_for(const Model& model, size_t bytes) {
  if (!model.on_gpu()) return std::make_shared<Block>(bytes);
  // Never destroyed: arrays may outlive the engine's static objects.
  static auto& pools = *new std::map<ggml_backend_buffer_type_t, std::shared_ptr<BlockPool>>();
  static auto& mutex = *new std::mutex();
  ggml_backend_buffer_type_t type = model.host_buffers();
  std::shared_ptr<BlockPool> pool;
  {
    const std::lock_guard<std::mutex> lock(mutex);
    auto& known = pools[type];
    if (known == nullptr) {
      known = std::make_shared<BlockPool>(most_bytes(),
                                          [type](size_t wanted) { return pinned_block(type, wanted); });
    }
    pool = known;
  }
  return pool->take(bytes);
}

}  // namespace llamatap
