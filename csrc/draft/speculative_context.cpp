#include "draft/speculative_context.hpp"

#include <algorithm>
#include <utility>

#include "draft/store_only.hpp"
#include "engine/error.hpp"

namespace llamatap {

SpeculativeContext::SpeculativeContext(std::shared_ptr<Context> target, std::shared_ptr<Model> draft,
                                       DraftKind kind, ContextOptions options)
    : kind_(kind), target_(std::move(target)), draft_(std::move(draft)) {
  if (draft_->options().vocab_only) throw Unsupported("the draft model was loaded without its weights");
  if (target_->drafts()) throw InvalidInput("the target is itself a draft context");
  if (!target_->has_memory() || !target_->causal()) {
    throw Unsupported(target_->model()->arch() + " does not generate text, so there is nothing to draft");
  }
  fit_ = fit_draft(*target_->model(), *draft_, kind_);
  options = draft_options(target_, *draft_, kind_, fit_, std::move(options));
  if (fit_.shares_memory) {
    const ContextLock lock = target_->hold();
    // Making the second context clears the cells that both share.
    if (!target_->is_empty()) {
      throw InvalidInput(
          "the draft attends to the target's memory, which must be empty when the speculative context is "
          "made; make it first, or clear the memory (memory.clear())");
    }
    make_context(options);
  } else {
    make_context(options);
  }
  if (kind_ == DraftKind::model && (!context_->has_memory() || !context_->causal())) {
    throw Unsupported(draft_->arch() + " does not generate text, so it cannot draft");
  }
}

void SpeculativeContext::make_context(const ContextOptions& options) {
  try {
    context_ = std::make_shared<Context>(draft_, options);
  } catch (const Unsupported&) {
    if (!fit_.inherits || !target_->model()->on_gpu() || draft_->on_gpu()) throw;
    throw Unsupported(
        "the draft uses the token embedding or output head of its target, which are on a GPU; load it there "
        "too (n_gpu_layers=-1)");
  }
}

void SpeculativeContext::store(const Batch& batch, const Poll& poll) {
  StoreOnly observer;
  const bool one_block = kind_ == DraftKind::eagle3 || kind_ == DraftKind::mtp;
  context_->decode(batch, one_block ? &observer : nullptr, poll);
}

void SpeculativeContext::decode(const Batch& batch, const Poll& poll) {
  if (!fit_.shares_memory) {
    context_->decode(batch, nullptr, poll);
    return;
  }
  const ContextLock lock = target_->hold();
  context_->decode(batch, nullptr, poll);
}

int32_t SpeculativeContext::n_vocab() const {
  return std::min(draft_->vocab().size(), target_->model()->vocab().size());
}

void SpeculativeContext::check_sequence(int32_t seq) const {
  const auto n = static_cast<int32_t>(context_->options().n_seq_max);
  if (seq < 0 || seq >= n) {
    throw InvalidInput("sequence id " + std::to_string(seq) + " is not in 0.." + std::to_string(n - 1) +
                       " (n_seq_max of the speculative context)");
  }
}

void SpeculativeContext::encode(const float* features, int32_t n, float* states, const Poll& poll) {
  if (kind_ == DraftKind::dflash) {
    throw Unsupported(
        "DFlash files have no encoder: the draft takes the target's features as they are; use DFlashDrafter");
  }
  if (kind_ == DraftKind::eagle3) {
    context_->encode(features, n, states, poll);
  } else {
    std::copy(features, features + static_cast<size_t>(n) * static_cast<size_t>(fit_.n_features), states);
  }
}

}  // namespace llamatap
