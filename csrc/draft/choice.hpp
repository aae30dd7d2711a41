#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft/draft_request.hpp"

namespace llamatap {

/// A drafted token and its probability.
struct Choice {
  int32_t token;  // -1: none, as the logits hold NaN
  float prob;
  float best;                       // probability of the most likely token
  std::vector<float> distribution;  // the token was drawn from this; empty without sampling
};

/// Chooses the next token of a draft of `length` tokens, among the first `n_vocab` (those that both target
/// and draft have). The distribution covers the target's `n_target` tokens.
Choice choose(const float* logits, int32_t n_vocab, int32_t n_target, const DraftSettings& settings,
              const DraftRequest& request, size_t length);

/// Appends a choice to a draft.
void append(Draft& draft, const Choice& choice);

/// Drops drafts shorter than n_min. Sampled drafts are kept: dropping them by length would bias the samples,
/// which must follow the distributions returned with them.
void drop_short(std::vector<Draft>& drafts, const DraftSettings& settings);

}  // namespace llamatap
