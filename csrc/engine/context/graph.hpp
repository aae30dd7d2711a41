#pragma once

#include <cstdint>
#include <vector>

struct ggml_cgraph;
struct ggml_tensor;

namespace llamatap {

/// View of an engine graph: the nodes of a ubatch, in the order of computation. Valid as long as the engine's
/// graph.
class Graph {
 public:
  /// `layer_inputs`: by block, the tensor that the engine's hook copies; may be shorter or hold null.
  Graph(ggml_cgraph* graph, const ggml_tensor* input_embeddings, const ggml_tensor* embeddings,
        bool has_logits, const std::vector<ggml_tensor*>* layer_inputs)
      : graph_(graph),
        input_embeddings_(input_embeddings),
        embeddings_(embeddings),
        has_logits_(has_logits),
        layer_inputs_(layer_inputs) {}

  int32_t size() const;
  const ggml_tensor* node(int32_t index) const;

  /// Number of reads of `tensor` by nodes, as the model's code built the graph.
  int32_t readers(const ggml_tensor* tensor) const;

  /// The tensor that the scheduler copied to `tensor` for another back end ("CUDA0#name#0"); `tensor` itself
  /// when it is not a copy.
  const ggml_tensor* original(const ggml_tensor* tensor) const;

  /// The input embeddings, looked up from tokens or given; null when the engine does not name them.
  const ggml_tensor* input_embeddings() const { return input_embeddings_; }

  /// The tensor that the engine returns as embeddings: the input of the output head, if any. May be null.
  const ggml_tensor* embeddings() const { return embeddings_; }

  /// Whether there is an output head (not in embedding models).
  bool has_logits() const { return has_logits_; }

  /// The input of a block, as the engine's hook copies it; null when the architecture has no hook.
  const ggml_tensor* hooked_input(int32_t block) const;

 private:
  ggml_cgraph* graph_;
  const ggml_tensor* input_embeddings_;
  const ggml_tensor* embeddings_;
  bool has_logits_;
  const std::vector<ggml_tensor*>* layer_inputs_;
};

}  // namespace llamatap
