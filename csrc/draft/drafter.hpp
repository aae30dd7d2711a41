#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "draft/draft_request.hpp"
#include "engine/context/batch.hpp"
#include "engine/polling.hpp"

namespace llamatap {

/// Guesses the next tokens of sequences. `process` comes after each decode of the target, with its batch;
/// `accept` after a batch of which a part is taken back, before anything else is asked of the sequence.
/// One thread at a time: a second one gets Busy.
class Drafter {
 public:
  virtual ~Drafter() = default;

  /// Width of what `process` takes of the target for each entry; 0: nothing.
  virtual int32_t n_features() const { return 0; }

  /// `states`: [entries, n_features] of the target, where the drafter needs them; else null.
  virtual void process(const Batch& batch, const float* states, const Poll& poll) = 0;

  /// The drafts, in the order of the requests; at most one request a sequence. Throws InvalidInput when a
  /// position does not follow what was processed.
  virtual std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) = 0;

  /// Keeps the sequence's first entry in the last processed batch and `n` drafted tokens after it; discards
  /// the rest.
  virtual void accept(int32_t seq, int32_t n) = 0;

  /// Forgets a sequence.
  virtual void reset(int32_t seq) = 0;

 protected:
  /// Throws Busy.
  std::unique_lock<std::mutex> lock();

 private:
  std::mutex mutex_;
};

/// Entries that wait for a draft before they enter the draft's memory without one.
constexpr int32_t kMostWaiting = 512;

}  // namespace llamatap
