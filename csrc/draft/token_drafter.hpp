#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "draft/drafter.hpp"
#include "draft/speculative_context.hpp"

namespace llamatap {

/// Drafts token by token: with a plain model, an EAGLE-3 block or MTP blocks, all sequences in one decode a
/// step.
///
/// What the draft's memory holds are pairs of a token and the target's state one position before it:
/// (token[p+1], state[p]), at position p for EAGLE-3 and p+1 for MTP; for a plain model, token[p+1] alone, at
/// p+1. The last state of a sequence waits for its token. Pairs are decoded as late as possible, together
/// with the first step of a draft, when it is known which of them stand.
class TokenDrafter : public Drafter {
 public:
  TokenDrafter(std::shared_ptr<SpeculativeContext> spec, const DraftSettings& settings);

  void process(const Batch& batch, const float* states, const Poll& poll) override;
  std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) override;
  void accept(int32_t seq, int32_t n) override;
  void reset(int32_t seq) override;

 private:
  struct Row {
    int32_t position;
    int32_t token;
    std::vector<float> state;
    bool encoded;
  };
  struct Sequence {
    /// Entries of the target whose states were not used yet; the first one is the oldest.
    std::vector<Row> rows;
    size_t batch_start = 0;  // the first of the last batch
    bool lost = false;       // there was no room for it, or it holds a token that the draft does not know
    int32_t seed = -1;       // the token that the first row's state was last paired with, in a draft
  };
  struct Live;

  int32_t decoded(const Sequence& sequence) const { return sequence.rows.front().position + offset_; }
  void check_start(const Sequence& sequence, int32_t seq, int32_t first) const;
  void take(Sequence& sequence, Row row, bool first);
  void encode(const std::vector<Sequence*>& sequences);
  void flush(int32_t seq, Sequence& sequence, const Poll& poll);
  void lose(int32_t seq, Sequence& sequence);
  bool take_back(int32_t seq, Sequence& sequence);
  bool try_flush(int32_t seq, Sequence& sequence, const Poll& poll);
  Batch empty_batch() const;
  void add(Batch& batch, int32_t token, const float* state, int32_t position, int32_t seq, bool output) const;
  void step(std::vector<Live>& live, const Poll& poll);
  bool take_choice(Live& one);

  std::shared_ptr<SpeculativeContext> spec_;
  DraftSettings settings_;
  int32_t offset_;
  std::vector<Sequence> sequences_;
};

}  // namespace llamatap
