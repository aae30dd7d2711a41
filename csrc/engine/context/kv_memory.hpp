#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "engine/context/batch.hpp"
#include "engine/context/context_options.hpp"
#include "engine/error.hpp"
#include "engine/model/model.hpp"

struct llama_context;
struct llama_memory_i;

namespace llamatap {

/// Memory of a context: KV cache, recurrent states, or both. Position ranges are half-open, [p0, p1); -1 is
/// "from the start" or "to the end". The caller must hold the context.
class KvMemory {
 public:
  /// Keeps references to both.
  KvMemory(const Model& model, const ContextOptions& options);
  void attach(llama_context* context);

  /// Whether past tokens are kept.
  bool exists() const;
  /// Whether it is the memory of the target; then only the target may change it.
  bool is_borrowed() const { return is_borrowed_; }
  bool is_empty() const;
  /// Cells in use, by all sequences.
  int64_t used_cells() const;
  /// How many cells were set to zero so far. Thread-safe.
  int64_t zeroed_cells() const { return zeroed_cells_.load(std::memory_order_relaxed); }

  void clear();
  void remove(int32_t seq, int32_t p0, int32_t p1);
  void copy(int32_t from, int32_t to, int32_t p0, int32_t p1);
  void keep(int32_t seq);
  void shift(int32_t seq, int32_t p0, int32_t p1, int32_t delta);
  int32_t first(int32_t seq) const;
  int32_t last(int32_t seq) const;
  std::string save(int32_t seq) const;
  void restore(int32_t seq, const std::string& state);

  // For decodes.
  /// Like last(), but -1 without a memory.
  int32_t last_or_none(int32_t seq) const;
  /// Removes all sequences. `zero`: also overwrites the cells, because some kernels multiply masked values by
  /// 0, which NaN survives. (NaN in cells need not show in the logits.)
  void empty(bool zero);
  /// Call after the engine wrote. `completely`: no failure, after which cells may have been freed again.
  void note_written(bool completely);
  /// Records how many tokens of each sequence recurrent layers can roll back. `ubatches` are indices into
  /// `given`, entries of the batch.
  void note_rewindable(const Batch& batch, const std::vector<int32_t>& given,
                       const std::vector<std::vector<int32_t>>& ubatches);
  /// Removes the tokens after these positions, or the whole sequence when a part cannot be removed.
  void undo_failed_decode(const std::vector<int32_t>& sequences, const std::vector<int32_t>& last_positions);

 private:
  /// Throws Unsupported when the model keeps no memory.
  llama_memory_i* engine_memory() const;
  /// Throws Unsupported also when the memory is borrowed.
  llama_memory_i* own_memory() const;
  void check_sequence(int32_t seq) const;
  /// Whether [p0, end) can be removed: sliding-window layers must still hold the next token's window.
  bool can_remove_suffix(int32_t seq, int32_t p0) const;
  Unsupported windows_lost() const;
  std::string saved(int32_t seq, uint32_t flags = 0) const;
  bool load(int32_t seq, const std::string& state, uint32_t flags = 0);
  void drop(int32_t seq);

  const Model& model_;
  const ContextOptions& options_;
  bool is_recurrent_;  // includes recurrent states
  bool is_borrowed_;
  llama_context* context_ = nullptr;
  std::vector<int32_t>
      rewindable_;  // by sequence: how many of its last tokens recurrent layers can roll back
  // Number of first cells of each cache that may be nonzero.
  static constexpr uint32_t kAllCells = UINT32_MAX;
  uint32_t written_cells_ = 0;
  std::atomic<int64_t> zeroed_cells_{0};
};

}  // namespace llamatap
