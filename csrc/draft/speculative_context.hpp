#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "draft/draft_fit.hpp"
#include "engine/context/context.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

/// One context of a draft model for all sequences of a target's context.
class SpeculativeContext {
 public:
  /// `options`: sizes and cache types; the rest is set here. Throws Unsupported or InvalidInput, with what
  /// was expected and found, when the draft does not fit the target.
  SpeculativeContext(std::shared_ptr<Context> target, std::shared_ptr<Model> draft, DraftKind kind,
                     ContextOptions options);

  DraftKind kind() const { return kind_; }
  const std::shared_ptr<Context>& target() const { return target_; }
  const std::shared_ptr<Context>& context() const { return context_; }
  /// The states of the target that it needs, as slots: 0..n, then the norm. Empty for plain models.
  const std::vector<int32_t>& target_slots() const { return fit_.target_slots; }
  /// Width of what the target gives for a token: of all slots together.
  int32_t n_features() const { return fit_.n_features; }
  /// Width of the states in pairs; 0 where tokens are decoded alone.
  int32_t n_state() const { return fit_.n_state; }
  /// MTP blocks that are used one after the other.
  int32_t n_heads() const { return fit_.n_heads; }
  const DraftBlock& block() const { return fit_.block; }
  /// The tokens that draft and target have both.
  int32_t n_vocab() const;
  /// To be held from a decode until its results are read. Throws Busy.
  std::unique_lock<std::mutex> hold();
  /// Throws InvalidInput for a sequence id that the context does not have.
  void check_sequence(int32_t seq) const;

  /// Whether its blocks attend to the target's memory and have none of their own (gemma4-assistant).
  bool shares_memory() const { return fit_.shares_memory; }

  /// As Context::decode. Where the memory is the target's, a thread that uses that one is in the way: Busy.
  void decode(const Batch& batch, const Poll& poll);

  /// The same of a batch without outputs: only what the memory keeps is computed.
  void store(const Batch& batch, const Poll& poll);

  /// [n, n_features] of the target to the states of pairs, [n, n_state]: the fusion of EAGLE-3; of MTP, the
  /// same values.
  void encode(const float* features, int32_t n, float* states, const Poll& poll);

 private:
  void make_context(const ContextOptions& options);

  DraftKind kind_;
  std::shared_ptr<Context> target_;
  std::shared_ptr<Model> draft_;
  std::shared_ptr<Context> context_;
  DraftFit fit_;
  std::mutex mutex_;
};

/// Selects which of several MTP blocks a context computes; selects the first one again when destroyed.
class HeadSelection {
 public:
  explicit HeadSelection(SpeculativeContext& spec) : spec_(spec) {}
  ~HeadSelection() { select(0); }
  HeadSelection(const HeadSelection&) = delete;
  HeadSelection& operator=(const HeadSelection&) = delete;

  void select(int32_t head) {
    if (spec_.n_heads() > 1) spec_.context()->select_head(head);
  }

 private:
  SpeculativeContext& spec_;
};

}  // namespace llamatap
