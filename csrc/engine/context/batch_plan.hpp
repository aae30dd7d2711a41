#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/batch.hpp"
#include "engine/context/batch_rules.hpp"

namespace llamatap {

/// One engine call of a decode: which entries of the batch it computes, in the order in which it does.
struct Piece {
  std::vector<int32_t> rows;         // all entries
  std::vector<int32_t> output_rows;  // those that pass through the whole last block
  bool may_stop = false;             // nothing after what the observer wants is needed
};

/// The part of a decode's request that the batch does not say.
struct PlanWishes {
  /// By entry: whether its whole last block is wanted, output or not. Empty: of none.
  std::vector<bool> needs_last_block;
  /// A piece without outputs may stop after the last wanted node.
  bool may_stop = false;
  /// The memory is dropped afterwards: a piece may stop wherever the batch has no outputs.
  bool scratch = false;
};

/// Cuts a batch that passed check_batch() into engine calls. Throws InvalidInput where one call must do and
/// does not.
std::vector<Piece> plan_batch(const Batch& batch, const BatchRules& rules, const PlanWishes& wishes);

}  // namespace llamatap
