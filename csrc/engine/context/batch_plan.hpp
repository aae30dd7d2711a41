#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/batch.hpp"
#include "engine/context/batch_check.hpp"

namespace llamatap {

/// Entries that one engine call of a decode computes, in order.
struct Piece {
  std::vector<int32_t> rows;         // all entries
  std::vector<int32_t> output_rows;  // those that pass through the last block
  bool may_stop = false;             // may stop after the last node that the observer wants
};

/// Requirements of a decode beyond its batch.
struct PlanWishes {
  /// By entry: whether it must pass through the last block, output or not. Empty: none.
  std::vector<bool> needs_last_block;
  /// A piece without outputs may stop after the last wanted node.
  bool may_stop = false;
  /// The memory is cleared afterwards: a piece may stop if the batch has no outputs.
  bool scratch = false;
};

/// Splits a batch that passed check_batch() into engine calls. Throws InvalidInput when it needs more than
/// one call but must be computed at once.
std::vector<Piece> plan_batch(const Batch& batch, const BatchRules& rules, const PlanWishes& wishes);

}  // namespace llamatap
