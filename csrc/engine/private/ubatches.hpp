#pragma once

#include <cstdint>
#include <optional>
#include <vector>

struct llama_batch;
struct llama_context;

namespace llamatap::internals {

/// The ubatches in which the engine will compute the entries of `batch`, and their order in each: asked of
/// its own splitter, with the memory as it is now. No value when the batch would not fit.
std::optional<std::vector<std::vector<int32_t>>> ubatches(llama_context* context, const llama_batch& batch);

}  // namespace llamatap::internals
