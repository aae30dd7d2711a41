#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

struct ggml_tensor;
struct llama_batch;
struct llama_context;
struct llama_model;
class llm_graph_result;

/// What the engine's public header does not offer, read from its internal ones. An engine bump that
/// breaks something breaks it here.
namespace llamatap::internals {

std::vector<std::string> device_names(const llama_model* model);

/// Throws Unsupported when the model has no plain token embedding matrix.
std::vector<float> token_embedding_rows(const llama_model* model, const std::vector<int32_t>& tokens);

/// The rows of the learned position embedding; what 32 bits hold, less one, without such.
int32_t position_limit(const llama_model* model);

bool has_experts(const llama_model* model);

/// Whether each cache of the memory has layers: of one without, moving positions ends the process.
bool can_shift(const llama_model* model);

/// In how many parts, each on one back end, the scheduler computes the current graph.
int32_t n_splits(const llama_context* context);

/// Carries out what memory operations have left to the next decode (moved positions, copied streams).
void apply_memory_updates(llama_context* context);

bool flash_attention(const llama_context* context);
bool causal_attention(const llama_context* context);

/// The ubatches in which the engine will compute the entries of `batch`, and their order in each: its own
/// splitter is asked, with the memory as it is now. No value when the batch would not fit.
std::optional<std::vector<std::vector<int32_t>>> ubatches(llama_context* context, const llama_batch& batch);

/// The graph of a ubatch, built but not computed; null when that fails. Valid until the next call for the
/// same context.
const llm_graph_result* reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs);

/// The engine's own copy of the input of a layer, made after each ubatch. Only where LayerSource::hooked says
/// that there is one: elsewhere the next decode aborts. Costs a new reservation of memory when it changes.
void hook_layer(llama_context* context, int32_t layer, bool on);

/// What the hook of a layer copied in the last decode: [n_tokens, n_embd] in batch order, until the next
/// call.
const float* hooked_rows(llama_context* context, int32_t layer);

/// Sets the graph callback of a context that was made with one; null: none, and no stops between nodes.
void set_callback(llama_context* context, bool (*callback)(ggml_tensor*, bool, void*));

/// The graph that the context is computing; to be called from the graph callback.
const llm_graph_result* computed_graph(llama_context* context);

}  // namespace llamatap::internals
