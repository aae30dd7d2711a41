#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "engine/context/context.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

/// Kinds of draft models: a complete language model; an EAGLE-3 block on features of the target; MTP blocks
/// on the target's last states; a DFlash block that attends to features of the target.
enum class DraftKind { model, eagle3, mtp, dflash };

/// Block layout of a DFlash or DSpark file.
struct DraftBlock {
  int32_t size = 0;        // slots at most: the last known token, then masks
  int32_t first_slot = 1;  // slot of the first drafted token
  int32_t mask_token = -1;
  bool chained = false;         // DSpark: the logits of a slot depend on the token before it
  bool has_confidence = false;  // DSpark: a head predicts whether the token will be accepted
};

/// The kind of `draft`, from its architecture and whether its MTP blocks were loaded.
DraftKind kind_of(const Model& draft);

/// Shapes of a draft that fits its target.
struct DraftFit {
  std::vector<int32_t> target_slots;  // target states it takes: 0..n, then the norm
  int32_t n_features = 0;             // width of these states, concatenated
  int32_t n_state = 0;                // width of a pair's state; 0: tokens only
  int32_t n_heads = 1;                // MTP blocks, used one after the other
  DraftBlock block;                   // DFlash only
  bool inherits = false;              // uses the target's token embedding or output head
  bool shares_memory = false;         // attends to the target's KV cache (gemma4-assistant)
};

/// The shapes of a draft for its target. Throws Unsupported or InvalidInput (expected, found) when it does
/// not fit.
DraftFit fit_draft(const Model& target, const Model& draft, DraftKind kind);

/// Completes the options of the draft's context: `options` holds sizes and cache types.
ContextOptions draft_options(const std::shared_ptr<Context>& target, const Model& draft, DraftKind kind,
                             const DraftFit& fit, ContextOptions options);

}  // namespace llamatap
