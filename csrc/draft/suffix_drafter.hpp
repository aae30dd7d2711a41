#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "draft/drafter.hpp"
#include "draft/progress.hpp"
#include "draft/suffix_cache.hpp"

namespace llamatap {

struct SuffixSettings {
  size_t max_bytes = size_t{64} << 20;  // of the cache
  int32_t n_max = 64;                   // maximum length of a draft
  int32_t n_min = 1;                    // shorter drafts are dropped
  double p_min = 0.5;                   // a draft ends where the probability of the whole is less
  double max_spec_factor = 1;           // maximum length of a draft in relation to its match
};

/// Suffix decoding (https://arxiv.org/abs/2411.04975): drafts what followed the longest suffix of the text
/// that occurred before, in this text or in any other since the drafter was made.
class SuffixDrafter : public Drafter {
 public:
  /// Throws InvalidInput when a setting is out of range.
  explicit SuffixDrafter(const SuffixSettings& settings);

  void process(const Batch& batch, const float* states, const Poll& poll) override;
  std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) override;
  void accept(int32_t seq, int32_t n) override;
  /// The text stays in the cache.
  void reset(int32_t seq) override;

  size_t n_bytes() const { return cache_.n_bytes(); }

 private:
  struct Sequence {
    std::vector<int32_t> tokens;
    Progress progress;
    SuffixCache::Text text;
    size_t n_cached = 0;   // tokens in the cache
    size_t n_certain = 0;  // tokens that cannot be rejected any more
  };

  void cache(Sequence& sequence, size_t n);
  void truncate(Sequence& sequence, size_t n) const;

  SuffixSettings settings_;
  SuffixCache cache_;
  std::map<int32_t, Sequence> sequences_;
};

}  // namespace llamatap
