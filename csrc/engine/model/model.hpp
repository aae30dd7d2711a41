#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "engine/model/draft_traits.hpp"
#include "engine/model/gguf_file.hpp"
#include "engine/model/model_options.hpp"
#include "engine/model/vocab.hpp"
#include "engine/polling.hpp"

struct llama_model;

struct ggml_backend_buffer_type;

namespace llamatap {

/// A loaded model. Contexts keep it alive.
class Model {
 private:
  struct Free {
    int32_t process;
    void operator()(llama_model* model) const;
  };

 public:
  using Handle = std::unique_ptr<llama_model, Free>;

  /// `progress` is called with the loaded fraction, 0..1, about every 50 ms on the calling thread; returning
  /// true stops the loading (Interrupted). Throws ModelLoadFailed with the engine's message, and OutOfMemory.
  static std::shared_ptr<Model> load(const std::string& path, const ModelOptions& options,
                                     const std::function<bool(float)>& progress);

  const std::string& path() const { return path_; }
  const ModelOptions& options() const { return options_; }
  const Metadata& metadata() const { return metadata_; }
  const Vocab& vocab() const { return vocab_; }
  llama_model* handle() const { return model_.get(); }
  /// Loads a file without its weights, to plan the memory of the model and its contexts; null when that
  /// fails.
  static Handle without_weights(const std::string& path, const ModelOptions& options);
  /// The id of the process that loaded the model: its threads do not survive a fork.
  int32_t process() const { return process_; }

  std::string arch() const;
  std::string description() const;
  std::string file_type() const;
  int32_t n_layer() const;
  int32_t n_embd() const;
  /// Width of the embeddings that a batch may carry in place of tokens.
  int32_t n_embd_input() const;
  int32_t n_ctx_train() const;
  uint64_t n_params() const;
  uint64_t size_bytes() const;
  bool has_encoder() const;
  bool has_decoder() const;
  bool has_experts() const { return has_experts_; }
  /// Whether layers are on another device than the CPU.
  bool on_gpu() const { return on_gpu_; }
  /// Memory of the host that the first device copies to at full speed; null where there is none.
  ggml_backend_buffer_type* host_buffers() const;
  /// Width of the sliding window; 0 without one.
  int32_t n_swa() const;
  bool is_recurrent() const;
  bool is_hybrid() const;
  /// Whether the engine computes several sequences of a context correctly. False for plamo2 (mixes them up or
  /// aborts), arwkv7 and rwkv6qwen2 (keep the last token of the wrong sequence) and minimax-01 (aborts for
  /// weight types with special CPU kernels: Q4_0, Q4_K).
  bool batches_sequences() const;
  /// Whether a batch may carry embeddings in place of tokens.
  bool takes_embeddings() const { return arch() != "graniteswitch"; }
  /// Whether the tokens of a batch see each other and no earlier batch. Needs llama_encode, although the
  /// engine makes a memory: llama_decode would mask later tokens and split the batch.
  bool is_encoder() const;
  /// The reason why the model cannot have a context of its own; empty when it can.
  std::string refusal() const;
  /// Positions are below this: the number of learned position embeddings, else the limit of 32 bits.
  int32_t position_limit() const;
  /// Positions per embedding: 4 with M-RoPE, else 1.
  int32_t n_positions() const;
  std::optional<std::string> chat_template(const std::optional<std::string>& name) const;
  /// Names of the devices that hold layers; empty when all are on the CPU.
  std::vector<std::string> device_names() const;
  /// The rows of the token embedding matrix, dequantised to float32: n * n_embd values.
  std::vector<float> token_embeddings(const std::vector<int32_t>& tokens) const;
  DraftTraits draft_traits() const;
  /// The reason why the model's MTP blocks cannot attend to the KV cache of this target; empty when they can.
  std::string shared_memory_mismatch(const Model& target) const;

 private:
  Model(Handle model, std::string path, const ModelOptions& options, Metadata metadata, bool blocks_alone);

  Handle model_;
  std::string path_;
  ModelOptions options_;
  Metadata metadata_;
  Vocab vocab_;
  int32_t process_;
  bool has_experts_;
  bool blocks_alone_;  // the file has MTP blocks but no trunk
  bool on_gpu_;
};

}  // namespace llamatap
