#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace llamatap {

class Context;
class Model;

struct ContextOptions {
  uint32_t n_ctx = 0;  // 0: the model's training context
  uint32_t n_batch = 2048;
  uint32_t n_ubatch = 512;
  uint32_t n_seq_max = 1;
  uint32_t n_rs_seq = 0;
  uint32_t n_outputs_max = 0;  // outputs of one engine call; 0: n_batch
  int32_t n_threads = 1;
  std::string type_k = "f16";
  std::string type_v = "f16";
  int32_t flash_attention = -1;  // -1: the engine decides; 0: off; 1: on
  bool kv_unified = true;
  bool swa_full = true;
  /// The target of a draft context, else null. The draft may use its token embeddings, output head or memory.
  std::shared_ptr<Context> target;
  bool mtp = false;    // compute the MTP blocks of the model instead of its trunk
  bool causal = true;  // draft contexts: whether attention is causal
  /// Bytes of memory that the process can still allocate; 0: do not check the context against it.
  uint64_t memory_available = 0;
};

/// The options with all sizes filled in and rounded, for this model. Throws InvalidInput or Unsupported when
/// such a context is impossible.
ContextOptions settled_options(const ContextOptions& options, const Model& model);

/// Whether the memory includes recurrent states. MTP blocks have attention only, also on a recurrent trunk.
bool has_recurrent_memory(const ContextOptions& options, const Model& model);

}  // namespace llamatap
