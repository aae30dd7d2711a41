#pragma once

#include <cstdint>
#include <string>

#include "engine/model/draft_traits.hpp"

struct llama_context;
struct llama_model;

/// Draft models (EAGLE-3, MTP, DFlash) and their contexts.
namespace llamatap::internals {

DraftTraits draft_traits(const llama_model* model);

/// The reason why MTP blocks that attend to a target's KV cache cannot attend to this target's; empty when
/// they can. In the engine, blocks with a sliding window read the cache of the target's last but one layer,
/// others that of its last layer.
std::string shared_memory_mismatch(const llama_model* draft, const llama_model* target);

/// Width of the features that llama_encode takes.
int32_t feature_width(const llama_model* model);
/// Width of the states of the MTP blocks.
int32_t draft_width(const llama_model* model);

/// Makes a draft context keep the states of its outputs, with bidirectional attention unless `causal`.
void give_next_states(llama_context* context, bool causal);

/// The state of an output of the last batch.
const float* next_state(llama_context* context, int32_t index);

/// The result of the last llama_encode, [n_tokens, n_embd].
const float* encoded_states(llama_context* context);

/// Selects the MTP block that the next decodes compute.
void select_mtp_block(llama_context* context, int32_t index);

}  // namespace llamatap::internals
