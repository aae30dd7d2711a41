#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

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

/// The order in which the engine will compute the entries of `batch`: its own splitter is asked, with
/// the memory as it is now. No value when the batch would not fit.
std::optional<std::vector<int32_t>> ubatch_order(llama_context* context, const llama_batch& batch);

/// The graph of a ubatch, built but not computed; null when that fails. Valid until the next call for the
/// same context.
const llm_graph_result* reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs);

/// The graph that the context is computing; to be called from the graph callback.
const llm_graph_result* computed_graph(llama_context* context);

}  // namespace llamatap::internals
