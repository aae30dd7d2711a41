#pragma once

#include <cstdint>

struct llama_context_params;

namespace llamatap {

class Model;

/// Throws OutOfMemory, with both numbers and the largest n_ctx that fits, when a context needs more than the
/// `available` bytes of the machine's memory or than a GPU has free. The engine plans the context without
/// allocating it, unless an upper bound already fits.
///
/// Counts KV caches, recurrent states, compute buffers and outputs (n_outputs_max; if that is 0, one per
/// sequence).
void require_context_memory(const Model& model, const llama_context_params& params, uint64_t available);

}  // namespace llamatap
