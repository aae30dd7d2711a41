#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct ggml_backend_device;
struct llama_model;

/// Hyperparameters, weights and devices of a model that the public header does not tell.
namespace llamatap::internals {

/// The devices that hold layers; empty when all layers are on the CPU.
std::vector<ggml_backend_device*> devices(const llama_model* model);
std::vector<std::string> device_names(const llama_model* model);

/// Rows of the token embedding matrix as float32. Throws Unsupported when the model has no plain one.
std::vector<float> token_embedding_rows(const llama_model* model, const std::vector<int32_t>& tokens);

/// Rows of the learned position embedding; INT32_MAX - 1 without one.
int32_t position_limit(const llama_model* model);

bool has_experts(const llama_model* model);

/// The fault in the number of values of a head that RoPE rotates; empty when there is none. With a fault the
/// engine would abort during a decode or never end it.
std::string rotation_problem(const llama_model* model);

}  // namespace llamatap::internals
