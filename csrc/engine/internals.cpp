#include "engine/internals.hpp"

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "engine/caches.hpp"
#include "engine/error.hpp"
#include "engine/graph.hpp"
#include "ggml-impl.h"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-graph.h"
#include "llama-model.h"

namespace {

// The context keeps the graph that it computes to itself. What is named in an explicit instantiation is
// exempt from access checks, and no longer compiles when the engine renames it.
llm_graph_result* computed_result(llama_context& context);

template <auto Member>
struct Reach {
  friend llm_graph_result* computed_result(llama_context& context) { return (context.*Member)(); }
};
template struct Reach<&llama_context::get_gf_res_prev>;

std::vector<uint32_t>& search_heads(llama_kv_cache& cache);

template <auto Member>
struct ReachHeads {
  friend std::vector<uint32_t>& search_heads(llama_kv_cache& cache) { return cache.*Member; }
};
template struct ReachHeads<&llama_kv_cache::v_heads>;

void add(llamatap::internals::Footprint& footprint, ggml_backend_buffer_type_t type, size_t bytes) {
  ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
  const auto kind = device == nullptr ? GGML_BACKEND_DEVICE_TYPE_CPU : ggml_backend_dev_type(device);
  const bool is_gpu = kind == GGML_BACKEND_DEVICE_TYPE_GPU || kind == GGML_BACKEND_DEVICE_TYPE_IGPU;
  if (is_gpu && !ggml_backend_buft_is_host(type)) {
    footprint.devices[device] += bytes;
    return;
  }
  footprint.host += bytes;
  // Weights that the CPU keeps in an order of its own are copies.
  if (type == ggml_backend_cpu_buffer_type()) footprint.mapped += bytes;
}

/// Where a memory looks for free places next. Planning a batch of sequences that have places of their own
/// leaves that of one sequence with another one, and with sliding windows tokens are then overwritten too
/// early.
class SearchHeads {
 public:
  explicit SearchHeads(llama_memory_i* memory) {
    for (auto* cache : llamatap::internals::caches_of(memory).list())
      kept_.emplace_back(cache, search_heads(*cache));
  }
  ~SearchHeads() {
    for (auto& [cache, heads] : kept_) search_heads(*cache) = heads;
  }
  SearchHeads(const SearchHeads&) = delete;
  SearchHeads& operator=(const SearchHeads&) = delete;

 private:
  std::vector<std::pair<llama_kv_cache*, std::vector<uint32_t>>> kept_;
};

}  // namespace

namespace llamatap::internals {

std::vector<ggml_backend_device*> devices(const llama_model* model) {
  std::vector<ggml_backend_device*> found;
  for (int32_t i = 0; i < llama_model_n_devices(model); ++i)
    found.push_back(llama_model_get_device(model, i));
  return found;
}

std::vector<std::string> device_names(const llama_model* model) {
  std::vector<std::string> names;
  for (ggml_backend_dev_t device : devices(model)) {
    names.push_back(std::string(ggml_backend_dev_name(device)) + " (" + ggml_backend_dev_description(device) +
                    ")");
  }
  return names;
}

std::vector<float> token_embedding_rows(const llama_model* model, const std::vector<int32_t>& tokens) {
  const ggml_tensor* matrix = model->tok_embd;
  if (matrix == nullptr || matrix->buffer == nullptr) {
    throw Unsupported("this model has no token embedding matrix");
  }
  const auto* traits = ggml_get_type_traits(matrix->type);
  if (matrix->type != GGML_TYPE_F32 && traits->to_float == nullptr) {
    throw Unsupported(std::string("token embeddings of type ") + ggml_type_name(matrix->type) +
                      " cannot be dequantised");
  }
  const auto width = static_cast<size_t>(matrix->ne[0]);
  const size_t row_bytes = ggml_row_size(matrix->type, matrix->ne[0]);
  std::vector<uint8_t> row(row_bytes);
  std::vector<float> result(tokens.size() * width);
  for (size_t i = 0; i < tokens.size(); ++i) {
    ggml_backend_tensor_get(matrix, row.data(), static_cast<size_t>(tokens[i]) * matrix->nb[1], row_bytes);
    float* target = result.data() + i * width;
    if (matrix->type == GGML_TYPE_F32) {
      std::memcpy(target, row.data(), row_bytes);
    } else {
      traits->to_float(row.data(), target, matrix->ne[0]);
    }
  }
  return result;
}

int32_t position_limit(const llama_model* model) {
  const auto* matrix = model->pos_embd;
  return matrix == nullptr ? std::numeric_limits<int32_t>::max() - 1 : static_cast<int32_t>(matrix->ne[1]);
}

bool has_experts(const llama_model* model) { return model->hparams.n_expert > 0; }

bool can_shift(const llama_context* context) {
  // A learned position is in the residual stream that keys and values were made of.
  if (context->get_model().pos_embd != nullptr) return false;
  const auto caches = caches_of(context->get_memory()).list();
  return std::all_of(caches.begin(), caches.end(), [](const llama_kv_cache* cache) {
    const auto bytes = cache->memory_breakdown();
    return std::any_of(bytes.begin(), bytes.end(), [](const auto& of_type) { return of_type.second > 0; });
  });
}

std::string rotation_problem(const llama_model* model) {
  const auto& hparams = model->hparams;
  if (llama_model_rope_type(model) == LLAMA_ROPE_TYPE_NONE) return {};
  for (uint32_t layer = 0; layer < hparams.n_layer() + hparams.n_layer_nextn; ++layer) {
    const uint32_t n = hparams.n_rot(layer);
    const uint32_t width = hparams.n_embd_head_k(layer);
    if (n > 0 && n % 2 == 0 && n <= width) continue;
    return "rope.dimension_count must be an even number in 2.." + std::to_string(width) +
           ", the width of a head of layer " + std::to_string(layer) + ", not " + std::to_string(n);
  }
  return {};
}

int32_t n_splits(const llama_context* context) {
  return ggml_backend_sched_get_n_splits(context->get_sched());
}

void apply_memory_updates(llama_context* context) { context->memory_update(/*optimize=*/false); }

bool flash_attention(const llama_context* context) { return context->get_cparams().flash_attn; }

bool causal_attention(const llama_context* context) { return context->get_cparams().causal_attn; }

std::optional<std::vector<std::vector<int32_t>>> ubatches(llama_context* context, const llama_batch& batch) {
  const auto& model = context->get_model();
  llama_batch_allocr splitter(model.hparams.n_pos_per_embd());
  const llama_batch_compat compat(context, batch);
  if (!splitter.init(*compat.batch_ext, model.vocab, false)) return std::nullopt;
  const SearchHeads heads(context->get_memory());
  // init_batch() only plans; the memory changes in apply(), which is not called here.
  const auto plan =
      context->get_memory()->init_batch(splitter, context->get_cparams().n_ubatch, /*embd_all=*/false);
  if (!plan || plan->get_status() != LLAMA_MEMORY_STATUS_SUCCESS) return std::nullopt;
  std::vector<std::vector<int32_t>> ubatches;
  do {
    ubatches.push_back(plan->get_ubatch().data->batch_idxs);
  } while (plan->next());
  return ubatches;
}

const llm_graph_result* reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs) {
  if (llama_graph_reserve(context, n_tokens, 1, n_outputs) == nullptr) return nullptr;
  return context->get_gf_res_reserve();
}

void hook_layer(llama_context* context, int32_t layer, bool on) {
  context->set_embeddings_layer_inp(static_cast<uint32_t>(layer), on);
}

const float* hooked_rows(llama_context* context, int32_t layer) {
  return context->get_embeddings_layer_inp(static_cast<uint32_t>(layer));
}

void set_callback(llama_context* context, bool (*callback)(ggml_tensor*, bool, void*)) {
  // Read whenever a graph is built; the context itself is not constant.
  auto& params = const_cast<llama_cparams&>(context->get_cparams());
  params.cb_eval = callback;
  // What the scheduler computes with when a graph is used again, and for graphs of other kinds.
  ggml_backend_sched_set_eval_callback(context->get_sched(), callback, params.cb_eval_user_data);
}

const llm_graph_result* computed_graph(llama_context* context) { return computed_result(*context); }

Footprint weights_footprint(const llama_model* model) {
  Footprint footprint;
  for (const auto& [type, bytes] : model->memory_breakdown()) add(footprint, type, bytes);
  return footprint;
}

Footprint context_footprint(const llama_context* context) {
  Footprint footprint;
  for (const auto& [type, bytes] : context->memory_breakdown()) {
    add(footprint, type, bytes.context + bytes.compute);
  }
  return footprint;
}

uint64_t recurrent_bytes(const llama_context* context) {
  uint64_t total = 0;
  if (const auto* memory = recurrent_of(context->get_memory())) {
    for (const auto& of_type : memory->memory_breakdown()) total += of_type.second;
  }
  return total;
}

uint64_t n_cells(const llama_context* context) {
  const auto caches = caches_of(context->get_memory()).list();
  uint64_t total = 0;
  for (const auto* cache : caches) total += uint64_t{cache->get_size()} * cache->get_n_stream();
  const bool has_others = caches.empty() && context->get_memory() != nullptr &&
                          dynamic_cast<llama_memory_recurrent*>(context->get_memory()) == nullptr;
  return has_others ? context->get_cparams().n_ctx : total;
}

double context_bound(const llama_model* model, const llama_context_params& params) {
  const auto& hparams = model->hparams;
  double keys_and_values = 0;
  double heads = 1;
  double width = hparams.n_embd;
  for (uint32_t layer = 0; layer < hparams.n_layer_all; ++layer) {
    const double values = std::max(hparams.n_embd_k_gqa(layer), hparams.n_embd_v_gqa_max());
    keys_and_values += 2 * values * sizeof(float);
    heads = std::max<double>(heads, hparams.n_head(layer) + hparams.indexer_n_head);
    width = std::max(width, double(hparams.n_ff(layer)) * std::max(1U, hparams.n_expert_used_max()));
    width = std::max(width, values);
  }
  const double n_vocab = model->vocab.n_tokens();
  const double n_seq = params.n_seq_max;
  const double n_ctx = double(params.n_ctx) + 256 * n_seq;
  const double n_tokens = std::min<double>(params.n_ubatch, n_ctx);
  const double n_outputs = std::max<double>(params.n_outputs_max, n_seq);
  const double states = (double(hparams.n_embd_r()) + hparams.n_embd_s() + hparams.ple_conv_state()) *
                        hparams.n_layer_all * n_seq * (1 + params.n_rs_seq);
  // Scores of each head, their softmax and copies; a dozen tensors of each width at once.
  const double compute =
      n_tokens * (4 * heads * std::max(n_ctx, n_tokens) + 16 * (width + hparams.n_embd) + 2 * n_vocab);
  // Some architectures have caches of indices beside those of keys and values.
  return 2 * (n_ctx * (keys_and_values + 100) + 4 * (states + compute + n_outputs * n_vocab));
}

DraftTraits draft_traits(const llama_model* model) {
  DraftTraits traits;
  const auto rows = [](const ggml_tensor* matrix) {
    return matrix == nullptr ? 0 : static_cast<int32_t>(matrix->ne[1]);
  };
  const auto* layers = llama_model_target_layer_ids(model);
  traits.target_layers.assign(layers, layers + llama_model_target_layer_ids_n(model));
  traits.n_features = static_cast<int32_t>(model->hparams.n_embd_inp_enc());
  traits.n_embd_out = static_cast<int32_t>(model->hparams.n_embd_out());
  // The engine puts another layer of one architecture in the same place.
  traits.n_mtp = model->hparams.router_layer >= 0 ? 0 : static_cast<int32_t>(model->hparams.n_layer_nextn);
  traits.n_embedding = model->tok_embd == nullptr ? 0 : static_cast<int32_t>(model->tok_embd->ne[0]);
  traits.n_embedding_rows = rows(model->tok_embd);
  traits.n_head_rows = rows(model->output);
  traits.has_markov = model->dspark_markov_w1 != nullptr;
  traits.has_confidence = model->dspark_conf_proj != nullptr;
  traits.has_selector = llama_model_dflash_selector_top_k(model) > 0;
  if (model->d2t != nullptr) {
    if (model->d2t->type != GGML_TYPE_I64) {
      throw Unsupported(std::string("d2t must be of type i64, not ") + ggml_type_name(model->d2t->type));
    }
    traits.d2t.resize(static_cast<size_t>(model->d2t->ne[0]));
    ggml_backend_tensor_get(model->d2t, traits.d2t.data(), 0, traits.d2t.size() * sizeof(int64_t));
  }
  return traits;
}

std::string shared_memory_mismatch(const llama_model* draft, const llama_model* target) {
  const auto& ours = draft->hparams;
  const auto& theirs = target->hparams;
  const uint32_t n = theirs.n_layer();
  if (n < 2 || theirs.swa_type == LLAMA_SWA_TYPE_NONE || !theirs.is_swa(n - 2) || theirs.is_swa(n - 1)) {
    return "the target's last but one layer must have a sliding window, and its last one none";
  }
  for (uint32_t layer = 0; layer < ours.n_layer_nextn; ++layer) {
    const uint32_t shared = ours.is_swa(layer) ? n - 2 : n - 1;
    const auto width = theirs.n_embd_head_k(shared);
    const auto heads = theirs.n_head_kv(shared);
    if (ours.n_embd_head_k(layer) != width || theirs.n_embd_head_v(shared) != width ||
        ours.n_head_kv(layer) != heads) {
      return "block " + std::to_string(layer) + " reads " + std::to_string(ours.n_head_kv(layer)) +
             " heads of " + std::to_string(ours.n_embd_head_k(layer)) + ", layer " + std::to_string(shared) +
             " of the target has " + std::to_string(heads) + " of " + std::to_string(width);
    }
  }
  return {};
}

int32_t feature_width(const llama_model* model) {
  return static_cast<int32_t>(model->hparams.n_embd_inp_enc());
}

int32_t draft_width(const llama_model* model) { return static_cast<int32_t>(model->hparams.n_embd_out()); }

void give_next_states(llama_context* context, bool causal) {
  context->set_embeddings_nextn(true, /*masked=*/true);
  if (!causal) context->set_causal_attn(false);
}

const float* next_state(llama_context* context, int32_t index) {
  return context->get_embeddings_nextn_ith(index);
}

const float* encoded_states(llama_context* context) { return context->get_embeddings_nextn(); }

void select_mtp_block(llama_context* context, int32_t index) { context->set_nextn_layer_offset(index); }

}  // namespace llamatap::internals

namespace llamatap {

Graph::Graph(const llm_graph_result* result) : result_(result), graph_(result->get_gf()) {}

int32_t Graph::size() const { return graph_->n_nodes; }

const ggml_tensor* Graph::node(int32_t index) const { return graph_->nodes[index]; }

int32_t Graph::readers(const ggml_tensor* tensor) const {
  const size_t slot = ggml_hash_find(&graph_->visited_hash_set, tensor);
  const bool known = slot != GGML_HASHSET_FULL && ggml_bitset_get(graph_->visited_hash_set.used, slot);
  return known ? graph_->use_counts[slot] : 0;
}

const ggml_tensor* Graph::original(const ggml_tensor* tensor) const {
  if (tensor->op != GGML_OP_NONE) return tensor;
  const std::string_view name = tensor->name;
  const auto first = name.find('#');
  const auto last = name.rfind('#');
  if (first == last) return tensor;
  const auto of = name.substr(first + 1, last - first - 1);
  for (int32_t i = 0; i < size(); ++i) {
    if (of == node(i)->name) return node(i);
  }
  for (int32_t i = 0; i < graph_->n_leafs; ++i) {
    if (of == graph_->leafs[i]->name) return graph_->leafs[i];
  }
  return tensor;
}

const ggml_tensor* Graph::input_embeddings() const { return result_->t_inp_embd; }

const ggml_tensor* Graph::embeddings() const { return result_->get_embd(); }

bool Graph::has_logits() const { return result_->get_logits() != nullptr; }

const ggml_tensor* Graph::hooked_input(int32_t block) const {
  const auto& inputs = result_->t_layer_inp;
  return static_cast<size_t>(block) < inputs.size() ? inputs[block] : nullptr;
}

}  // namespace llamatap
