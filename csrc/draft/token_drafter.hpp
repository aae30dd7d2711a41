#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "draft/drafter.hpp"
#include "draft/pending_pairs.hpp"
#include "draft/progress.hpp"
#include "draft/speculative_context.hpp"

namespace llamatap {

/// Drafts token by token with a plain model, an EAGLE-3 block or MTP blocks; each step decodes all sequences
/// in one batch.
///
/// The draft's KV cache holds pairs of a token and the target's state one position before it: (token[p+1],
/// state[p]), at position p for EAGLE-3 and p+1 for MTP; for a plain model, token[p+1] alone, at p+1. The
/// last state of a sequence waits for its token. Pairs are decoded as late as possible, with the first step
/// of a draft, when it is known which were accepted.
class TokenDrafter : public Drafter {
 public:
  TokenDrafter(std::shared_ptr<SpeculativeContext> spec, const DraftSettings& settings);

  int32_t n_features() const override { return spec_->n_features(); }
  void process(const Batch& batch, const float* states, const Poll& poll) override;
  std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) override;
  void accept(int32_t seq, int32_t n) override;
  void reset(int32_t seq) override;

 private:
  struct Sequence {
    explicit Sequence(PendingPairs none) : pairs(std::move(none)) {}
    void drop_complete();
    void restart() { *this = Sequence(pairs.fresh()); }

    Progress progress;
    PendingPairs pairs;
    /// No drafts until reset(): no room in the KV cache, earlier tokens dropped by sliding windows, a token
    /// that the draft does not know, or states that are not finite.
    bool lost = false;
  };
  struct DraftInProgress;

  int32_t room_after(int32_t position) const;
  void encode(const std::vector<int32_t>& seqs, const Poll& poll);
  void flush(const std::vector<int32_t>& seqs, const Poll& poll);
  void lose(int32_t seq);
  bool roll_back(int32_t seq);
  void try_flush(const std::vector<int32_t>& seqs, const Poll& poll);
  void add_pairs(Batch& batch, int32_t seq);
  void start(std::vector<DraftInProgress>& in_progress, const Poll& poll);
  Batch empty_batch() const;
  void add(Batch& batch, int32_t token, const float* state, int32_t position, int32_t seq, bool output) const;
  void step(std::vector<DraftInProgress>& in_progress, const Poll& poll);
  bool take_choice(DraftInProgress& one);

  std::shared_ptr<SpeculativeContext> spec_;
  DraftSettings settings_;
  std::vector<Sequence> sequences_;
};

}  // namespace llamatap
