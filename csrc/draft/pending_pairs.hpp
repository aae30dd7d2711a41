#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llamatap {

/// A token of the target and its state, as the draft takes it.
struct TargetEntry {
  int32_t position = -1;
  int32_t token = -1;
  std::vector<float> state;
  bool encoded = false;
};

/// Entries of a sequence whose states are not in the draft's KV cache yet, oldest first. Each state forms a
/// pair with the token after it; the last one waits for its token.
class PendingPairs {
 public:
  /// `offset`: position of a pair minus position of its state. With 1, the state of the first pair is
  /// `n_state` zeros.
  PendingPairs(int32_t offset, size_t n_state) : offset_(offset), n_state_(n_state) {}

  /// The same settings, no entries.
  PendingPairs fresh() const { return {offset_, n_state_}; }
  bool empty() const { return entries_.empty(); }
  std::vector<TargetEntry>& entries() { return entries_; }
  const TargetEntry& last() const { return entries_.back(); }
  size_t n_complete() const { return entries_.empty() ? 0 : entries_.size() - 1; }
  /// First position that may still be processed again: earlier pairs were decoded.
  int32_t earliest() const;
  /// Position of the pair with the state `index`.
  int32_t position(size_t index) const { return entries_[index].position + offset_; }
  /// Position of the last, incomplete pair.
  int32_t next_position() const { return position(entries_.size() - 1); }
  /// End of the pairs in the KV cache.
  int32_t decoded_end() const { return entries_.empty() ? 0 : position(0); }

  /// Appends an entry, replacing those from its position on.
  void take(TargetEntry entry);
  /// Removes the entries from position `next` on.
  void truncate(int32_t next);
  /// Removes the complete pairs, now in the KV cache; keeps the last state.
  void drop_complete() { entries_.erase(entries_.begin(), entries_.end() - 1); }
  /// Records that a draft decoded the first state with this token (-1: none).
  void set_drafted(int32_t token) { drafted_ = token; }

 private:
  int32_t offset_;
  size_t n_state_;
  std::vector<TargetEntry> entries_;
  int32_t drafted_ = -1;
};

}  // namespace llamatap
