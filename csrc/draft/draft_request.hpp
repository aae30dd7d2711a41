#pragma once

#include <cstdint>
#include <vector>

namespace llamatap {

/// Request for a draft of one sequence, starting at `position` + 1. `last_token` is at `position` and was not
/// decoded yet.
struct DraftRequest {
  int32_t seq;
  int32_t last_token;
  int32_t position;
  int32_t n_max;
  uint32_t seed = 0;  // of the sampling in this sequence
};

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<float> probs;          // of each token; empty when the drafter has none
  std::vector<float> distributions;  // [tokens, n_vocab] drawn from; empty without sampling
};

struct DraftSettings {
  int32_t n_max = 4;      // maximum length of a draft
  int32_t n_min = 0;      // shorter drafts are dropped
  float p_min = 0;        // a draft ends where the most likely token has less
  float temperature = 0;  // 0: the most likely token; else drawn from softmax(logits / temperature)
  uint32_t seed = 0;      // of sampling
};

}  // namespace llamatap
