#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llamatap {

/// An entry of the target: its token, and the state that the draft takes of it.
struct TargetEntry {
  int32_t position = -1;
  int32_t token = -1;
  std::vector<float> state;
  bool encoded = false;
};

/// The entries of a sequence whose states are not in the draft's memory yet, oldest first. Each state makes a
/// pair with the token after it; the last one waits for its token.
class PendingPairs {
 public:
  /// `offset`: from the position of a state to that of its pair; with 1, the first pair has a state of
  /// `n_state` zeros.
  PendingPairs(int32_t offset, size_t n_state) : offset_(offset), n_state_(n_state) {}

  /// The same without entries.
  PendingPairs fresh() const { return {offset_, n_state_}; }
  bool empty() const { return entries_.empty(); }
  std::vector<TargetEntry>& entries() { return entries_; }
  const TargetEntry& last() const { return entries_.back(); }
  size_t n_complete() const { return entries_.empty() ? 0 : entries_.size() - 1; }
  /// The first position at which entries may be processed again: those before have been decoded.
  int32_t earliest() const;
  /// Position of a pair, by the index of its state.
  int32_t position(size_t index) const { return entries_[index].position + offset_; }
  /// Position of the pair whose token is not known yet.
  int32_t next_position() const { return position(entries_.size() - 1); }
  /// Where the pairs that are in the memory end.
  int32_t decoded_end() const { return entries_.empty() ? 0 : position(0); }

  /// Appends an entry, in place of those from its position on.
  void take(TargetEntry entry);
  /// Removes the entries from position `next` on.
  void truncate(int32_t next);
  /// Removes the complete pairs, which are in the memory now; the last state stays.
  void drop_complete() { entries_.erase(entries_.begin(), entries_.end() - 1); }
  /// A draft has decoded the first state with this token (-1: none).
  void set_drafted(int32_t token) { drafted_ = token; }

 private:
  int32_t offset_;
  size_t n_state_;
  std::vector<TargetEntry> entries_;
  int32_t drafted_ = -1;
};

}  // namespace llamatap
