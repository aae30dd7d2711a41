#pragma once

#include <cstdint>
#include <vector>

#include "engine/batch.hpp"
#include "engine/worker.hpp"

namespace llamatap {

/// What a sequence wants drafted: tokens for the positions from `position` + 1 on, after `last_token`, which
/// is at `position` and was not decoded yet.
struct DraftRequest {
  int32_t seq;
  int32_t last_token;
  int32_t position;
  int32_t n_max;
};

struct Draft {
  std::vector<int32_t> tokens;
  std::vector<float> probs;          // the drafter's probability of each token; empty where it has none
  std::vector<float> distributions;  // [tokens, n_vocab] that they were drawn from; empty when not asked for
};

/// Guesses the next tokens of sequences. `process` comes after each decode of the target, with its batch;
/// `accept` after a batch of which a part is taken back, before anything else is asked of the sequence.
/// One thread at a time: a second one gets Busy.
class Drafter {
 public:
  virtual ~Drafter() = default;

  /// `states`: [entries, n_features] of the target, where the drafter needs them; else null.
  virtual void process(const Batch& batch, const float* states, const Poll& poll) = 0;

  /// In the order of the requests; of one sequence there is one at most. Throws InvalidInput when a position
  /// does not follow what was processed.
  virtual std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) = 0;

  /// Of the sequence's entries in the last processed batch, the first and `n` more stand; the rest never was.
  virtual void accept(int32_t seq, int32_t n) = 0;

  /// Forgets a sequence.
  virtual void reset(int32_t seq) = 0;
};

}  // namespace llamatap
