#pragma once

#include <cstdint>
#include <map>

struct ggml_backend_device;
struct llama_context;
struct llama_context_params;
struct llama_model;

/// Sizes of the engine's buffers.
namespace llamatap::internals {

/// Bytes of buffers, by device.
struct Footprint {
  uint64_t host = 0;
  uint64_t mapped = 0;  // weights in `host` that need no memory when the file is mapped
  std::map<ggml_backend_device*, uint64_t> devices;
};

/// Weights of a model, also when it was loaded without them (no_alloc).
Footprint weights_footprint(const llama_model* model);

/// Memory of sequences and compute buffers of a context, also when the model was loaded without weights and
/// nothing is allocated. Without outputs.
Footprint context_footprint(const llama_context* context);

/// Bytes of the recurrent states of a context; allocated even when the model was loaded without weights.
uint64_t recurrent_bytes(const llama_context* context);

/// Cells of the KV caches, for all sequences.
uint64_t n_cells(const llama_context* context);

/// Quick upper bound of the bytes of a context of this model, on all devices together.
double context_bound(const llama_model* model, const llama_context_params& params);

}  // namespace llamatap::internals
