#pragma once

#include <cstdint>
#include <memory>
#include <string>

namespace llamatap {

class Context;
class Model;

struct ContextOptions {
  uint32_t n_ctx = 0;  // 0: as the model was trained
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
  /// The target of a draft context, else null. The draft may use the target's token embeddings, output
  /// head or memory.
  std::shared_ptr<Context> target;
  bool mtp = false;    // computes the MTP blocks of the model instead of its trunk
  bool causal = true;  // of a context that drafts: whether a block of tokens sees only those before
  /// Bytes of the machine's memory that the process can still take; 0: the context is not checked against it.
  uint64_t memory_available = 0;
};

/// The options as a context of the model uses them: sizes filled in and rounded. Throws InvalidInput or
/// Unsupported where there is no such context.
ContextOptions settled_options(const ContextOptions& options, const Model& model);

/// Whether the memory is, in part or whole, the state of recurrent layers. MTP blocks have attention only,
/// whatever the trunk is made of.
bool has_recurrent_memory(const ContextOptions& options, const Model& model);

}  // namespace llamatap
