#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "draft/draft_request.hpp"

namespace llamatap {

/// The token that a drafter takes from logits, with its probability.
struct Choice {
  int32_t token;  // -1: none, the logits hold NaN
  float prob;
  float best;                       // the probability of the most likely token
  std::vector<float> distribution;  // that it was drawn from; empty when it is the most likely one
};

/// The token after `length` others of a draft, of the first `n_vocab`: those that target and draft have both.
/// The distribution is over the `n_target` tokens of the target.
Choice choose(const float* logits, int32_t n_vocab, int32_t n_target, const DraftSettings& settings,
              const DraftRequest& request, size_t length);

/// Appends a choice to a draft.
void append(Draft& draft, const Choice& choice);

/// Drops drafts that are too short. Sampled drafts stay: their length depends on the samples, so the rest
/// would no longer follow the distributions that it comes with.
void drop_short(std::vector<Draft>& drafts, const DraftSettings& settings);

}  // namespace llamatap
