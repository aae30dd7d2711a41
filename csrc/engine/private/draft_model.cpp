#include "engine/private/draft_model.hpp"

#include <ggml-backend.h>
#include <llama.h>

#include "engine/error.hpp"
#include "llama-context.h"
#include "llama-ext.h"
#include "llama-model.h"

namespace llamatap::internals {

DraftTraits draft_traits(const llama_model* model) {
  DraftTraits traits;
  const auto rows = [](const ggml_tensor* matrix) {
    return matrix == nullptr ? 0 : static_cast<int32_t>(matrix->ne[1]);
  };
  const auto* layers = llama_model_target_layer_ids(model);
  traits.target_layers.assign(layers, layers + llama_model_target_layer_ids_n(model));
  traits.n_features = static_cast<int32_t>(model->hparams.n_embd_inp_enc());
  traits.n_embd_out = static_cast<int32_t>(model->hparams.n_embd_out());
  // One architecture stores its router layer in the same field.
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
