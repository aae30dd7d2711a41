#pragma once

#include <cstdint>
#include <vector>

namespace llamatap {

/// Request for a draft of one sequence: tokens for the positions from `position` + 1 on, after `last_token`,
/// which is at `position` and was not decoded yet.
struct DraftRequest {
  int32_t seq;
  int32_t last_token;
  int32_t position;
  int32_t n_max;
  uint32_t seed = 0;  // of the draws for this sequence
};

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<float> probs;          // the drafter's probability of each token; empty where it has none
  std::vector<float> distributions;  // [tokens, n_vocab] that they were drawn from; empty when not asked for
};

struct DraftSettings {
  int32_t n_max = 4;      // tokens of a draft at most
  int32_t n_min = 0;      // shorter ones are dropped
  float p_min = 0;        // a draft ends where no token is as likely
  float temperature = 0;  // 0: the most likely token; else drawn from softmax(logits / temperature)
  uint32_t seed = 0;      // of the draws
};

/// Throws InvalidInput when a sequence is asked for twice.
void check_requests(const std::vector<DraftRequest>& requests);

}  // namespace llamatap
