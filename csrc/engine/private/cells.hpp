#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/position_ranges.hpp"

struct llama_context;
struct llama_memory_i;
class llama_kv_cache;
class llama_memory_recurrent;

namespace llamatap {

/// The positions that the sequences of a context hold, read from the cells of the engine's cache: there is no
/// second bookkeeping. In a unified cache a cell can belong to several sequences, and a move in one of them
/// moves it in all. Recurrent layers have one state for a whole sequence.
class Cells {
 public:
  explicit Cells(const llama_context* context);

  /// The first and last position; -1 of an empty sequence.
  int32_t first(int32_t seq) const;
  int32_t last(int32_t seq) const;
  bool any(int32_t seq, PositionRange range) const;
  /// Whether the range covers the whole sequence; also when that is empty.
  bool within(int32_t seq, PositionRange range) const {
    return last(seq) < 0 || (range.begin <= first(seq) && range.end > last(seq));
  }
  /// Whether layers with sliding windows have dropped some of a sequence.
  bool dropped(int32_t seq) const;
  HeldPositions held(int32_t seq) const;

  /// The sequences of 0..n_seq_max-1 that have tokens of `seq` in the range; `seq` too.
  std::vector<int32_t> sharers(int32_t seq, PositionRange range, int32_t n_seq_max) const;
  /// The positions that `other` holds once the tokens of `seq` in the range are moved by `delta`.
  HeldPositions held_after(int32_t other, int32_t seq, PositionRange range, int32_t delta) const;

  /// Cells that are taken, of all sequences.
  int64_t used() const;

 private:
  const llama_memory_i* memory_;
  const llama_kv_cache* all_ = nullptr;      // null: recurrent layers only
  const llama_kv_cache* windows_ = nullptr;  // null: none
  const llama_memory_recurrent* recurrent_ = nullptr;
};

/// One beyond the highest cell that is taken in any cache of the context's memory.
uint32_t cells_in_use(llama_context* context);

/// Empties the memory and sets to zero the first `n` cells of each cache, and all recurrent states. Returns
/// how many cells these were; -1, with nothing done, for a memory that is made of more.
int64_t zero_cells(llama_context* context, uint32_t n);

}  // namespace llamatap
