#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/context/context.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

/// How a file drafts: a language model of its own; an EAGLE-3 block on features of the target; one or more
/// MTP blocks on its last states; a DFlash block that sees features of the target.
enum class DraftKind { model, eagle3, mtp, dflash };

/// The blocks of a DFlash or DSpark file.
struct DraftBlock {
  int32_t size = 0;        // its places at most: the last known token, then masks
  int32_t first_slot = 1;  // the place that gives the first token
  int32_t mask_token = -1;
  bool chained = false;         // DSpark: each place's logits depend on the token of the one before
  bool has_confidence = false;  // DSpark: and how likely it is to be accepted
};

/// One context of a draft model for all sequences of a target's context.
class SpeculativeContext {
 public:
  /// The kind of `draft`, from its architecture and whether its MTP blocks were loaded.
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
  const DraftBlock& block() const { return block_; }
  /// The tokens that draft and target have both.
  int32_t n_vocab() const;
  /// Held by who decodes and then reads what came of it. Throws Busy.
  std::unique_lock<std::mutex> hold();
  /// Throws InvalidInput for a sequence id that the context does not have.
  void check_sequence(int32_t seq) const;

  /// Whether its blocks attend to the target's memory and have none of their own (gemma4-assistant).
  bool shares_memory() const { return shares_memory_; }

  /// As Context::decode. Where the memory is the target's, a thread that uses that one is in the way: Busy.
  void decode(const Batch& batch, const Poll& poll);

  /// The same of a batch without outputs: only what the memory keeps is computed.
  void store(const Batch& batch, const Poll& poll);

  /// [n, n_features] of the target to the states of pairs, [n, n_state]: the fusion of EAGLE-3; of MTP, the
  /// same values.
  void encode(const float* features, int32_t n, float* states, const Poll& poll);

 private:
  void make_context(const ContextOptions& options);
  void check_vocabulary() const;
  /// Checks and sizes of drafts that take the target's features (EAGLE-3, DFlash).
  void fit_features(const char* what);
  void fit_mtp();
  void fit_shared_memory(ContextOptions& options) const;
  void fit_dflash();
  void check_layers(const std::vector<int32_t>& layers) const;
  void check_width(int32_t n_embd_out) const;

  DraftKind kind_;
  std::shared_ptr<Context> target_;
  std::shared_ptr<Model> draft_;
  std::shared_ptr<Context> context_;
  std::vector<int32_t> target_slots_;
  int32_t n_features_ = 0;
  int32_t n_state_ = 0;
  int32_t n_heads_ = 1;
  DraftBlock block_;
  bool inherits_ = false;  // the target's token embedding or output head
  bool shares_memory_ = false;
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
