#include "draft/pending_pairs.hpp"

#include <utility>

namespace llamatap {

int32_t PendingPairs::earliest() const {
  if (entries_.empty()) return 0;
  const int32_t first = entries_.front().position;
  return offset_ == 0 && first == 0 ? 0 : first + 1;
}

void PendingPairs::take(TargetEntry entry) {
  if (entries_.empty() && offset_ == 1) {
    // The state before the first token is all zeros.
    entries_.push_back({-1, -1, std::vector<float>(n_state_, 0.0F), true});
  } else if (!entries_.empty()) {
    truncate(entry.position);
    // The draft's KV cache already holds this pair.
    if (entries_.size() == 1 && entry.token == drafted_) entries_.clear();
    drafted_ = -1;
  }
  entries_.push_back(std::move(entry));
}

void PendingPairs::truncate(int32_t next) {
  entries_.resize(static_cast<size_t>(next - entries_.front().position));
}

}  // namespace llamatap
