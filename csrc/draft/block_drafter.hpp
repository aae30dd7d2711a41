#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "draft/drafter.hpp"
#include "draft/progress.hpp"
#include "draft/speculative_context.hpp"

namespace llamatap {

/// Drafts a block of tokens in one decode: DFlash and DSpark. The draft's KV cache holds the target's
/// features, at the positions of the target's tokens. A block (the last token, then masks) attends to them;
/// each slot gives one token. Features are decoded as late as possible, when it is known which tokens were
/// accepted.
class BlockDrafter : public Drafter {
 public:
  BlockDrafter(std::shared_ptr<SpeculativeContext> spec, const DraftSettings& settings);

  int32_t n_features() const override { return spec_->n_features(); }
  void process(const Batch& batch, const float* states, const Poll& poll) override;
  std::vector<Draft> draft(const std::vector<DraftRequest>& requests, const Poll& poll) override;
  void accept(int32_t seq, int32_t n) override;
  void reset(int32_t seq) override;

 private:
  struct Sequence {
    Progress progress;
    int32_t injected = 0;         // positions whose features are in the draft's KV cache
    std::vector<float> features;  // pending, [next - injected, n_features]
    bool lost = false;            // no room in the KV cache, or the target's states were not finite
  };

  void inject(const std::vector<int32_t>& seqs, const Poll& poll);
  void lose(int32_t seq);
  void make_room(const std::vector<int32_t>& seqs, const Poll& poll);
  bool try_inject(int32_t seq, const Poll& poll);
  void read_block(const DraftRequest& request, int32_t first_row, int32_t limit, Draft& draft) const;

  std::shared_ptr<SpeculativeContext> spec_;
  DraftSettings settings_;
  std::vector<Sequence> sequences_;
};

}  // namespace llamatap
