#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "draft/draft_fit.hpp"
#include "engine/context/context.hpp"
#include "engine/model/model.hpp"
#include "engine/try_hold.hpp"

namespace llamatap {

/// A draft model's context, for all sequences of a target's context.
class SpeculativeContext {
 public:
  /// `options`: sizes and cache types; the rest is set here. Throws Unsupported or InvalidInput (expected,
  /// found) when the draft does not fit the target.
  SpeculativeContext(std::shared_ptr<Context> target, std::shared_ptr<Model> draft, DraftKind kind,
                     ContextOptions options);

  DraftKind kind() const { return kind_; }
  const std::shared_ptr<Context>& target() const { return target_; }
  const std::shared_ptr<Context>& context() const { return context_; }
  /// Target states that the draft takes, as slots: 0..n, then the norm. Empty for plain models.
  const std::vector<int32_t>& target_slots() const { return fit_.target_slots; }
  /// Width of the target's features for a token: all slots together.
  int32_t n_features() const { return fit_.n_features; }
  /// Width of a pair's state; 0 when the draft decodes tokens only.
  int32_t n_state() const { return fit_.n_state; }
  /// MTP blocks, used one after the other.
  int32_t n_heads() const { return fit_.n_heads; }
  const DraftBlock& block() const { return fit_.block; }
  /// Tokens that both draft and target have: ids below this.
  int32_t n_vocab() const;
  /// Hold it from a decode until its results are read. Throws Busy if another thread does.
  std::unique_lock<std::mutex> hold() {
    return try_hold(mutex_, "another thread is using this speculative context");
  }
  /// Throws InvalidInput for an invalid sequence id.
  void check_sequence(int32_t seq) const;

  /// Whether the draft attends to the target's KV cache and has none of its own (gemma4-assistant).
  bool shares_memory() const { return fit_.shares_memory; }

  /// Like Context::decode. Throws Busy if another thread uses the shared memory.
  void decode(const Batch& batch, const Poll& poll);

  /// Decodes a batch without outputs, computing only what the KV cache stores.
  void store(const Batch& batch, const Poll& poll);

  /// Turns the target's features, [n, n_features], into the states of pairs, [n, n_state]. EAGLE-3 fuses
  /// them; MTP copies them.
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

/// Selects one of several MTP blocks for decoding; back to the first one when destroyed.
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
