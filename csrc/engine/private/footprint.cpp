#include "engine/private/footprint.hpp"

#include <ggml-backend.h>
#include <llama.h>

#include <algorithm>

#include "engine/private/caches.hpp"
#include "llama-context.h"
#include "llama-model.h"

namespace {

void add(llamatap::internals::Footprint& footprint, ggml_backend_buffer_type_t type, size_t bytes) {
  ggml_backend_dev_t device = ggml_backend_buft_get_device(type);
  const auto kind = device == nullptr ? GGML_BACKEND_DEVICE_TYPE_CPU : ggml_backend_dev_type(device);
  const bool is_gpu = kind == GGML_BACKEND_DEVICE_TYPE_GPU || kind == GGML_BACKEND_DEVICE_TYPE_IGPU;
  if (is_gpu && !ggml_backend_buft_is_host(type)) {
    footprint.devices[device] += bytes;
    return;
  }
  footprint.host += bytes;
  // Weights that the CPU back end repacks are copies, not mapped.
  if (type == ggml_backend_cpu_buffer_type()) footprint.mapped += bytes;
}

}  // namespace

namespace llamatap::internals {

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
  // Attention scores of each head, their softmax and copies; a dozen tensors of each width.
  const double compute =
      n_tokens * (4 * heads * std::max(n_ctx, n_tokens) + 16 * (width + hparams.n_embd) + 2 * n_vocab);
  // + 100: some architectures have index caches beside the KV cache.
  return 2 * (n_ctx * (keys_and_values + 100) + 4 * (states + compute + n_outputs * n_vocab));
}

}  // namespace llamatap::internals
