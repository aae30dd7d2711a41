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
  uint64_t mapped = 0;  // of weights: the part of `host` that a mapped file need not have in memory
  std::map<ggml_backend_device*, uint64_t> devices;
};

/// The weights of a model, also of one that was loaded without them (no_alloc).
Footprint weights_footprint(const llama_model* model);

/// The memory of sequences and the compute buffers, also where nothing is allocated because the model was
/// loaded without weights. Outputs are not included.
Footprint context_footprint(const llama_context* context);

/// Bytes of the recurrent states of a context. Allocated even where the model was loaded without weights.
uint64_t recurrent_bytes(const llama_context* context);

/// Cells of the KV caches, of all sequences together.
uint64_t n_cells(const llama_context* context);

/// Upper bound, quick to compute, of the bytes of a context of this model, on all devices together.
double context_bound(const llama_model* model, const llama_context_params& params);

}  // namespace llamatap::internals
