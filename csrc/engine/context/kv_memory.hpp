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

/// The memory of a context: KV cache, recurrent states, or both. Positions are half-open ranges [p0, p1),
/// where -1 stands for "from the start" and "to the end". Every call must hold the context.
class KvMemory {
 public:
  /// Refers to both as long as it lives.
  KvMemory(const Model& model, const ContextOptions& options);
  void attach(llama_context* context);

  /// Whether past tokens are kept.
  bool exists() const;
  /// Whether it is, in part or whole, the state of recurrent layers.
  bool is_recurrent() const { return is_recurrent_; }
  /// Whether it is the memory of the target, which is changed through the target alone.
  bool is_borrowed() const { return is_borrowed_; }
  bool is_empty() const;
  /// Cells that are taken, of all sequences.
  int64_t used_cells() const;
  /// How many cells were set to zero since the context was made. For any thread.
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
  /// As last(), and -1 where there is no memory.
  int32_t last_or_none(int32_t seq) const;
  /// Removes all sequences. With `zero` nothing is left of what was written: some kernels multiply masked
  /// values by 0, which NaN survives. (Logits need not show NaN that is there.)
  void empty(bool zero);
  /// To be called after the engine wrote; `completely`: without giving up, which may have freed cells again.
  void note_written(bool completely);
  /// Takes note of how many tokens of each sequence recurrent layers can take back, by ubatch. `given`: the
  /// entries of the batch that the ubatches number.
  void note_rewindable(const Batch& batch, const std::vector<int32_t>& given,
                       const std::vector<std::vector<int32_t>>& ubatches);
  /// Removes what came after these positions, or the whole sequence where a part cannot be removed.
  void roll_back(const std::vector<int32_t>& sequences, const std::vector<int32_t>& last_positions);

 private:
  /// Throws Unsupported when the model keeps none.
  llama_memory_i* engine_memory() const;
  /// Throws Unsupported also when it is borrowed.
  llama_memory_i* own_memory() const;
  void check_sequence(int32_t seq) const;
  /// Whether [p0, end) can be removed: sliding-window layers must still hold the window of the next token.
  bool can_remove_suffix(int32_t seq, int32_t p0) const;
  Unsupported windows_lost() const;
  std::string saved(int32_t seq, uint32_t flags = 0) const;
  bool load(int32_t seq, const std::string& state, uint32_t flags = 0);
  void drop(int32_t seq);

  const Model& model_;
  const ContextOptions& options_;
  bool is_recurrent_;
  bool is_borrowed_;
  llama_context* context_ = nullptr;
  std::vector<int32_t>
      rewindable_;  // by sequence: how many of its last tokens recurrent layers can take back
  // The first cells of each cache that may hold anything but zeros.
  static constexpr uint32_t kAllCells = UINT32_MAX;
  uint32_t written_cells_ = 0;
  std::atomic<int64_t> zeroed_cells_{0};
};

}  // namespace llamatap
