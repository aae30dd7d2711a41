#pragma once

#include <cstdint>

struct llama_context_params;

namespace llamatap {

class Model;

/// Throws OutOfMemory when a context needs more than the `available` bytes of the machine's memory, or than
/// is free on a GPU: with both numbers and the largest n_ctx that fits. The engine itself is asked, in a
/// context that is planned but not allocated, unless a bound says at once that there is room.
///
/// Counted are the caches of keys and values, recurrent states, the buffers that graphs are computed in and
/// room for outputs: n_outputs_max of them where that was asked for, else one a sequence.
void require_context_memory(const Model& model, const llama_context_params& params, uint64_t available);

}  // namespace llamatap
