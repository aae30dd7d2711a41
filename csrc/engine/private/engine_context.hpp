#pragma once

#include <cstdint>
#include <optional>

#include "engine/context/graph.hpp"

struct ggml_cgraph;
struct ggml_tensor;
struct llama_context;
class llm_graph_result;

/// Settings, graphs and hooks of an engine context.
namespace llamatap::internals {

bool flash_attention(const llama_context* context);
bool causal_attention(const llama_context* context);

/// Number of parts of the current graph, each computed on one back end.
int32_t n_splits(const llama_context* context);

/// Whether positions can be moved. In a KV cache without layers, moving them would end the process.
bool can_shift(const llama_context* context);

/// Applies memory operations that are pending until the next decode (moved positions, copied streams).
void apply_memory_updates(llama_context* context);

/// Switches the engine's hook that copies the input of a layer after each ubatch. Requires
/// LayerSource::hooked: else the next decode aborts. Each change makes the engine reserve memory again.
void hook_layer(llama_context* context, int32_t layer, bool on);

/// Rows that the hook of a layer copied in the last decode: [n_tokens, n_embd] in batch order, valid until
/// the next call.
const float* hooked_rows(llama_context* context, int32_t layer);

/// Sets the graph callback; its user data was set when the context was made. Null: no callback, no stops
/// between nodes.
void set_callback(llama_context* context, bool (*callback)(ggml_tensor*, bool, void*));

/// Builds the graph of a ubatch without computing it; no value on failure. Valid until the next call for the
/// context.
std::optional<Graph> reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs);

/// The graph that the context is computing; call it from the graph callback.
Graph computed_graph(llama_context* context);

/// The logits of a graph that stopped before it computed them.
struct HiddenLogits {
  llm_graph_result* graph = nullptr;
  ggml_tensor* logits = nullptr;
};

/// Hides the logits of the graph that the context is computing, which the engine would copy to the host (for
/// each output as many floats as the vocabulary has entries); call it from the graph callback. Nothing is
/// hidden where there are none, or where they are hidden already.
void hide_logits(llama_context* context, HiddenLogits& hidden);
/// Undoes it: the engine may use the graph again, for a decode with logits.
void show_logits(HiddenLogits& hidden);

Graph graph_of(const llm_graph_result& result);

/// Number of reads of `tensor` by nodes of the graph.
int32_t use_count(const ggml_cgraph* graph, const ggml_tensor* tensor);

}  // namespace llamatap::internals
