#pragma once

#include <cstdint>
#include <optional>
#include <vector>

struct llama_batch;
struct llama_context;

namespace llamatap::internals {

/// The ubatches that the engine will split `batch` into with the current memory: by ubatch, the indices of
/// its entries in order. No value when the batch does not fit.
std::optional<std::vector<std::vector<int32_t>>> ubatches(llama_context* context, const llama_batch& batch);

}  // namespace llamatap::internals
