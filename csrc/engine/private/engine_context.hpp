#pragma once

#include <cstdint>
#include <optional>

#include "engine/context/graph.hpp"

struct ggml_cgraph;
struct ggml_tensor;
struct llama_context;

/// Settings, graphs and hooks of a context of the engine.
namespace llamatap::internals {

bool flash_attention(const llama_context* context);
bool causal_attention(const llama_context* context);

/// The number of parts, each on one back end, in which the scheduler computes the current graph.
int32_t n_splits(const llama_context* context);

/// Whether each KV cache of the memory has layers: moving positions in one without ends the process.
bool can_shift(const llama_context* context);

/// Carries out what memory operations have left to the next decode (moved positions, copied streams).
void apply_memory_updates(llama_context* context);

/// Switches the engine's own copy of the input of a layer, made after each ubatch. Only where
/// LayerSource::hooked is set: elsewhere the next decode aborts. Each change costs a new reservation of
/// memory.
void hook_layer(llama_context* context, int32_t layer, bool on);

/// The rows that the hook of a layer copied in the last decode: [n_tokens, n_embd] in batch order, valid
/// until the next call.
const float* hooked_rows(llama_context* context, int32_t layer);

/// Sets the graph callback of a context that was made with one. Null: no callback, and no stops between
/// nodes.
void set_callback(llama_context* context, bool (*callback)(ggml_tensor*, bool, void*));

/// The graph of a ubatch, built but not computed; no value when that fails. Valid until the next call for the
/// same context.
std::optional<Graph> reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs);

/// The graph that the context is computing; to be called from the graph callback.
Graph computed_graph(llama_context* context);

/// How often nodes of the graph read `tensor`.
int32_t use_count(const ggml_cgraph* graph, const ggml_tensor* tensor);

}  // namespace llamatap::internals
