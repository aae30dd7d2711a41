#pragma once

#include <cstdint>
#include <functional>

#include "engine/context/batch.hpp"

namespace llamatap {

/// Limits and abilities of a context, for checking and splitting batches.
struct BatchRules {
  int32_t n_vocab = 0;
  int32_t position_limit = 0;
  int32_t n_positions = 1;  // per entry: 4 with M-RoPE
  int32_t n_swa = 0;        // width of the sliding window; 0: none
  uint32_t n_seq_max = 1;
  uint32_t n_batch = 0;
  uint32_t n_ubatch = 0;
  uint32_t n_outputs_max = 0;  // outputs of one engine call; 0: n_batch
  bool has_memory = true;      // past tokens are kept
  bool at_once = false;        // a batch is computed in one ubatch: no memory, or no causal attention
  bool kv_unified = true;
  bool shares_entries = true;      // an entry may belong to several sequences
  bool computes_all_rows = false;  // the engine computes all rows, outputs or not, and reads the first ones
};

/// Throws InvalidInput (entry, expected, found) unless the context can compute the batch. `last(seq)`: the
/// last position of a sequence in memory, or -1; not called without a memory.
void check_batch(const Batch& batch, const BatchRules& rules, const std::function<int32_t(int32_t)>& last);

}  // namespace llamatap
