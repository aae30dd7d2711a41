#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/position_ranges.hpp"

struct llama_context;
struct llama_memory_i;
class llama_kv_cache;
class llama_memory_recurrent;

namespace llamatap {

/// Positions of the sequences of a context, read from the engine's cache cells. In a unified cache a cell can
/// belong to several sequences; moving it in one moves it in all. Recurrent layers have one state per
/// sequence.
class Cells {
 public:
  explicit Cells(const llama_context* context);

  /// First and last position; -1 for an empty sequence.
  int32_t first(int32_t seq) const;
  int32_t last(int32_t seq) const;
  bool any(int32_t seq, PositionRange range) const;
  /// Whether the range covers the whole sequence; true for an empty one.
  bool within(int32_t seq, PositionRange range) const {
    return last(seq) < 0 || (range.begin <= first(seq) && range.end > last(seq));
  }
  /// Whether sliding-window layers have dropped tokens of a sequence.
  bool dropped(int32_t seq) const;
  HeldPositions held(int32_t seq) const;

  /// Sequences of 0..n_seq_max-1 that share tokens of `seq` in the range; includes `seq`.
  std::vector<int32_t> sharers(int32_t seq, PositionRange range, int32_t n_seq_max) const;
  /// The positions of `other` after moving the tokens of `seq` in the range by `delta`.
  HeldPositions held_after(int32_t other, int32_t seq, PositionRange range, int32_t delta) const;

  /// Cells in use, by all sequences.
  int64_t used() const;

 private:
  const llama_memory_i* memory_;
  const llama_kv_cache* all_ = nullptr;      // null: recurrent layers only
  const llama_kv_cache* windows_ = nullptr;  // null: none
  const llama_memory_recurrent* recurrent_ = nullptr;
};

/// 1 + the highest cell in use in any cache of the context's memory.
uint32_t cells_in_use(llama_context* context);

/// Clears the memory; zeroes the first `n` cells of each cache and all recurrent states. Returns the number
/// of cells; -1, doing nothing, for a memory with other parts.
int64_t zero_cells(llama_context* context, uint32_t n);

}  // namespace llamatap
