#pragma once

#include <cstdint>
#include <memory>
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

/// The kind of `draft`, from its architecture and whether its MTP blocks were loaded.
DraftKind kind_of(const Model& draft);

/// Shapes of a draft that fits its target.
struct DraftFit {
  std::vector<int32_t> target_slots;  // states of the target that it takes: 0..n, then the norm
  int32_t n_features = 0;             // width of all of these together
  int32_t n_state = 0;                // width of the states in pairs; 0: tokens are decoded alone
  int32_t n_heads = 1;                // MTP blocks that are used one after the other
  DraftBlock block;                   // of dflash
  bool inherits = false;              // it uses the target's token embedding or output head
  bool shares_memory = false;         // its blocks attend to the target's memory (gemma4-assistant)
};

/// Throws Unsupported or InvalidInput, with what was expected and found, when the draft does not fit the
/// target.
DraftFit fit_draft(const Model& target, const Model& draft, DraftKind kind);

/// The options of the draft's context, from sizes and cache types.
ContextOptions draft_options(const std::shared_ptr<Context>& target, const Model& draft, DraftKind kind,
                             const DraftFit& fit, ContextOptions options);

}  // namespace llamatap
