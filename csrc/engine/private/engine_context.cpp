#include "engine/private/engine_context.hpp"

#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>
#include <utility>

#include "engine/private/caches.hpp"
#include "ggml-impl.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-graph.h"
#include "llama-model.h"

namespace {

// The graph being computed is private. Names in an explicit instantiation are exempt from access checks, and
// stop compiling when the engine renames them.
llm_graph_result* computed_result(llama_context& context);

template <auto Member>
struct Reach {
  friend llm_graph_result* computed_result(llama_context& context) { return (context.*Member)(); }
};
template struct Reach<&llama_context::get_gf_res_prev>;

}  // namespace

namespace llamatap::internals {

Graph graph_of(const llm_graph_result& result) {
  return {result.get_gf(), result.t_inp_embd, result.get_embd(), result.get_logits() != nullptr,
          &result.t_layer_inp};
}

bool flash_attention(const llama_context* context) { return context->get_cparams().flash_attn; }

bool causal_attention(const llama_context* context) { return context->get_cparams().causal_attn; }

int32_t n_splits(const llama_context* context) {
  return ggml_backend_sched_get_n_splits(context->get_sched());
}

bool can_shift(const llama_context* context) {
  // Keys and values depend on learned positions and cannot be moved.
  if (context->get_model().pos_embd != nullptr) return false;
  const auto caches = caches_of(context->get_memory()).list();
  return std::all_of(caches.begin(), caches.end(), [](const llama_kv_cache* cache) {
    const auto bytes = cache->memory_breakdown();
    return std::any_of(bytes.begin(), bytes.end(), [](const auto& of_type) { return of_type.second > 0; });
  });
}

void apply_memory_updates(llama_context* context) { context->memory_update(/*optimize=*/false); }

void hook_layer(llama_context* context, int32_t layer, bool on) {
  context->set_embeddings_layer_inp(static_cast<uint32_t>(layer), on);
}

const float* hooked_rows(llama_context* context, int32_t layer) {
  return context->get_embeddings_layer_inp(static_cast<uint32_t>(layer));
}

void set_callback(llama_context* context, bool (*callback)(ggml_tensor*, bool, void*)) {
  // The engine reads it when it builds a graph. The context is not const.
  auto& params = const_cast<llama_cparams&>(context->get_cparams());
  params.cb_eval = callback;
  // The scheduler uses this one for reused graphs and graphs of other kinds.
  ggml_backend_sched_set_eval_callback(context->get_sched(), callback, params.cb_eval_user_data);
}

std::optional<Graph> reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs) {
  if (llama_graph_reserve(context, n_tokens, 1, n_outputs) == nullptr) return std::nullopt;
  return graph_of(*context->get_gf_res_reserve());
}

Graph computed_graph(llama_context* context) { return graph_of(*computed_result(*context)); }

void hide_logits(llama_context* context, HiddenLogits& hidden) {
  auto* graph = computed_result(*context);
  if (graph->t_logits != nullptr) hidden = {graph, std::exchange(graph->t_logits, nullptr)};
}

void show_logits(HiddenLogits& hidden) {
  // A graph that was built anew since has logits of its own.
  if (hidden.graph != nullptr && hidden.graph->t_logits == nullptr) hidden.graph->t_logits = hidden.logits;
  hidden = {};
}

int32_t use_count(const ggml_cgraph* graph, const ggml_tensor* tensor) {
  const size_t slot = ggml_hash_find(&graph->visited_hash_set, tensor);
  const bool known = slot != GGML_HASHSET_FULL && ggml_bitset_get(graph->visited_hash_set.used, slot);
  return known ? graph->use_counts[slot] : 0;
}

}  // namespace llamatap::internals
