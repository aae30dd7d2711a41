#pragma once

#include <cstdint>
#include <map>
#include <unordered_map>
#include <vector>

#include "draft/drafter.hpp"
#include "draft/progress.hpp"

namespace llamatap {

/// Prompt lookup: drafts the tokens that followed the latest earlier occurrence of the longest n-gram
/// (n_longest down to n_shortest tokens) at the end of the text.
class NGramDrafter : public Drafter {
 public:
  /// Throws InvalidInput unless 1 <= n_shortest <= n_longest and n_max >= 1.
  NGramDrafter(int32_t n_longest, int32_t n_shortest, int32_t n_max, int32_t n_min);

  void process(const Batch& batch, const float* states, const Poll& poll) override;
  std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) override;
  void accept(int32_t seq, int32_t n) override;
  void reset(int32_t seq) override;

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    Progress progress;
    size_t indexed = 0;
    /// By hash of an n-gram: the end of its latest occurrence with a successor.
    std::unordered_map<uint64_t, size_t> ends;

    void truncate(size_t n);
  };

  void index(Sequence& sequence) const;

  int32_t n_longest_;
  int32_t n_shortest_;
  int32_t n_max_;
  int32_t n_min_;
  std::map<int32_t, Sequence> sequences_;
};

}  // namespace llamatap
