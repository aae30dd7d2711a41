#include "engine/private/model_weights.hpp"

#include <ggml-backend.h>
#include <ggml.h>
#include <llama.h>

#include <cstring>
#include <limits>

#include "engine/error.hpp"
#include "llama-ext.h"
#include "llama-model.h"

namespace llamatap::internals {

std::vector<ggml_backend_device*> devices(const llama_model* model) {
  std::vector<ggml_backend_device*> found;
  found.reserve(static_cast<size_t>(llama_model_n_devices(model)));
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

}  // namespace llamatap::internals
