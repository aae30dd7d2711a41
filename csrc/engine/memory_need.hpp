#pragma once

#include <cstdint>
#include <string>
#include <vector>

struct llama_context_params;

namespace llamatap {

class Model;
struct ModelOptions;

/// Throws OutOfMemory when a context needs more than the `available` bytes of the machine's memory, or than
/// is free on a GPU: with both numbers and the largest n_ctx that fits. The engine itself is asked, in a
/// context that is planned but not allocated, unless a bound says at once that there is room.
///
/// Counted are the caches of keys and values, recurrent states, the buffers that graphs are computed in and
/// room for outputs: n_outputs_max of them where that was asked for, else one a sequence.
void require_context_memory(const Model& model, const llama_context_params& params, uint64_t available);

/// Throws OutOfMemory when the weights of these files (the parts of a split model) need more memory than is
/// available. Those that the file is mapped for need none: their pages can be dropped and read again. (Some
/// types the CPU keeps in an order of its own, which is a copy.)
void require_model_memory(const std::vector<std::string>& paths, const ModelOptions& options);

/// Bytes for a message.
std::string size_text(double bytes);

/// Whether the engine failed because it got no memory.
bool says_no_memory(const std::string& message);

}  // namespace llamatap
