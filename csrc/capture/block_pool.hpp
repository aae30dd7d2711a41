#pragma once

#include <cstddef>
#include <functional>
#include <list>
#include <memory>
#include <mutex>

#include "capture/block.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

/// Keeps blocks for reuse: the first touch of fresh memory takes longer than a copy into it, and pinned
/// memory takes longer still. What someone holds is theirs; it comes back when the last view ends.
/// Thread-safe.
class BlockPool : public std::enable_shared_from_this<BlockPool> {
 public:
  using Allocate = std::function<std::unique_ptr<Block>(size_t bytes)>;

  /// `most_bytes`: limit on blocks that nobody holds.
  BlockPool(size_t most_bytes, Allocate allocate) : most_bytes_(most_bytes), allocate_(std::move(allocate)) {}

  /// A block of at least `bytes`: the smallest that is kept, unless it has more than twice as many; or a new
  /// one.
  std::shared_ptr<Block> take(size_t bytes);
  /// Bytes of blocks that nobody holds.
  size_t idle_bytes() const;

 private:
  void give_back(std::unique_ptr<Block> block);

  const size_t most_bytes_;
  const Allocate allocate_;
  mutable std::mutex mutex_;
  std::list<std::unique_ptr<Block>> idle_;  // the newest first
  size_t idle_bytes_ = 0;
};

/// A block for states that come from the devices of `model`: pinned and reused, so that they are copied to it
/// at full speed. Memory of the process for a model on the CPU.
std::shared_ptr<Block> block_for(const Model& model, size_t bytes);

}  // namespace llamatap
