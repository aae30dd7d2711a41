#pragma once

#include <cstdint>
#include <mutex>
#include <vector>

#include "draft/draft_request.hpp"
#include "engine/context/batch.hpp"
#include "engine/polling.hpp"
#include "engine/try_hold.hpp"

namespace llamatap {

/// Drafts the next tokens of sequences. Call `process` after each decode of the target, with its batch;
/// `accept` after a batch that is partly rolled back, before any other call for the sequence. One thread at a
/// time: a second one gets Busy.
class Drafter {
 public:
  virtual ~Drafter() = default;

  /// Width of the target's features that `process` takes for each entry; 0: none.
  virtual int32_t n_features() const { return 0; }

  /// `states`: the target's features, [entries, n_features]; null when n_features() is 0.
  virtual void process(const Batch& batch, const float* states, const Poll& poll) = 0;

  /// Drafts for at most one request per sequence, in the order of the requests. Throws InvalidInput unless
  /// each position follows the last processed one.
  virtual std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) = 0;

  /// Keeps the sequence's first entry in the last processed batch and the `n` drafted tokens after it;
  /// discards the rest.
  virtual void accept(int32_t seq, int32_t n) = 0;

  /// Forgets a sequence.
  virtual void reset(int32_t seq) = 0;

 protected:
  std::unique_lock<std::mutex> hold() { return try_hold(mutex_, "another thread is using this drafter"); }

 private:
  std::mutex mutex_;
};

/// Pending entries of a sequence above which they are decoded without a draft.
constexpr int32_t kMaxPending = 512;

}  // namespace llamatap
