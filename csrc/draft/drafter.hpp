#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "engine/batch.hpp"
#include "engine/worker.hpp"

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
  int32_t n_min = 0;      // shorter ones are given up
  float p_min = 0;        // a draft ends where no token is as likely
  float temperature = 0;  // 0: the most likely token; else drawn from softmax(logits / temperature)
  uint32_t seed = 0;      // of the draws
};

/// How far a drafter has followed a sequence, in positions of the target.
struct Progress {
  int32_t next = 0;         // the position that comes next
  int32_t batch_start = 0;  // the first position of the last batch

  /// Throws InvalidInput unless entries from `first` on follow. Entries from `earliest` on may be taken back
  /// by processing others in their place.
  void check_start(int32_t seq, int32_t first, int32_t earliest) const;
  void begin_batch(int32_t first, int32_t n);
  /// Keeps the first entry of the last batch and `n` drafted tokens after it, and discards the rest. Throws
  /// InvalidInput when there are fewer.
  void accept(int32_t seq, int32_t n);
};

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

  /// In the order of the requests; of one sequence there is one at most. Throws InvalidInput when a position
  /// does not follow what was processed.
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

/// The entries of a batch of tokens by sequence, each in the order of their positions. Throws InvalidInput
/// for another kind of batch.
std::map<int32_t, std::vector<int32_t>> entries_by_sequence(const Batch& batch);

/// Throws InvalidInput unless the positions of these entries, in their order, have no gap.
void check_contiguous(const Batch& batch, const std::vector<int32_t>& rows);

/// Whether n values are numbers: in a memory, others would come to sequences that have nothing to do with
/// them.
bool all_finite(const float* values, size_t n);

/// Throws InvalidInput when a sequence is asked for twice.
void check_requests(const std::vector<DraftRequest>& requests);

/// Throws InvalidInput unless the last token follows what was processed.
void check_position(const DraftRequest& request, const Progress& progress);

/// The token that a drafter takes from logits, with its probability.
struct Choice {
  int32_t token;  // -1: none, of logits that are not numbers
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

/// Gives up drafts that are too short. Not drawn ones: which are short depends on what was drawn, and what is
/// left would no longer be drawn from the distributions that it comes with.
void drop_short(std::vector<Draft>& drafts, const DraftSettings& settings);

/// Entries that wait for a draft before they enter the draft's memory without one.
constexpr int32_t kMostWaiting = 512;

}  // namespace llamatap
