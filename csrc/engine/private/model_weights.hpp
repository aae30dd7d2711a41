#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct ggml_backend_device;
struct llama_model;

/// Hyperparameters, weights and devices that the engine's public header does not expose.
namespace llamatap::internals {

/// The devices that hold layers; empty when all layers are on the CPU.
std::vector<ggml_backend_device*> devices(const llama_model* model);
std::vector<std::string> device_names(const llama_model* model);

/// Rows of the token embedding matrix as float32. Throws Unsupported when there is none, or its type cannot
/// be dequantised.
std::vector<float> token_embedding_rows(const llama_model* model, const std::vector<int32_t>& tokens);

/// Number of learned position embeddings; INT32_MAX - 1 without them.
int32_t position_limit(const llama_model* model);

bool has_experts(const llama_model* model);

/// A fault in the number of values of a head that RoPE rotates; empty when it is valid. With a fault, a
/// decode would abort or never end.
std::string rotation_problem(const llama_model* model);

}  // namespace llamatap::internals
