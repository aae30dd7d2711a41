#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/context.hpp"
#include "engine/model.hpp"

namespace llamatap {

/// How a file drafts: a language model of its own; an EAGLE-3 block on features of the target; one or more
/// MTP blocks on its last states; a DFlash block that sees features of the target.
enum class DraftKind { model, eagle3, mtp, dflash };

/// One context of a draft model for all sequences of a target's context.
class SpeculativeContext {
 public:
  /// What `draft` is, as its file and the way it was loaded say.
  static DraftKind kind_of(const Model& draft);

  /// `options`: sizes and cache types; the rest is set here. Throws Unsupported or InvalidInput, with what
  /// was expected and found, when the draft does not fit the target.
  SpeculativeContext(std::shared_ptr<Context> target, std::shared_ptr<Model> draft, DraftKind kind,
                     ContextOptions options);

  DraftKind kind() const { return kind_; }
  const std::shared_ptr<Context>& target() const { return target_; }
  const std::shared_ptr<Context>& context() const { return context_; }
  /// The states of the target that it needs, as slots: 0..n, then the norm. Empty for plain models.
  const std::vector<int32_t>& target_slots() const { return target_slots_; }
  /// Width of what the target gives for a token: of all slots together.
  int32_t n_features() const { return n_features_; }
  /// Width of the states in pairs; 0 where tokens are decoded alone.
  int32_t n_state() const { return n_state_; }
  /// MTP blocks that are used one after the other.
  int32_t n_heads() const { return n_heads_; }
  /// Tokens of a DFlash block, the last known one included.
  int32_t block_size() const { return block_size_; }
  int32_t mask_token() const { return mask_token_; }

  /// [n, n_features] of the target to the states of pairs, [n, n_state]: the fusion of EAGLE-3; of MTP, the
  /// same values.
  void encode(const float* features, int32_t n, float* states);

 private:
  void check_vocabulary() const;
  void fit_eagle3();
  void fit_mtp();
  void fit_dflash();
  void check_layers(const std::vector<int32_t>& layers) const;

  DraftKind kind_;
  std::shared_ptr<Context> target_;
  std::shared_ptr<Model> draft_;
  std::shared_ptr<Context> context_;
  std::vector<int32_t> target_slots_;
  int32_t n_features_ = 0;
  int32_t n_state_ = 0;
  int32_t n_heads_ = 1;
  int32_t block_size_ = 0;
  int32_t mask_token_ = -1;
};

}  // namespace llamatap
