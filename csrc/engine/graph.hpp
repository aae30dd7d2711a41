#pragma once

#include <cstdint>

struct ggml_cgraph;
struct ggml_tensor;
class llm_graph_result;

namespace llamatap {

/// A graph of the engine: the nodes that a ubatch computes, in the order in which it does.
class Graph {
 public:
  explicit Graph(const llm_graph_result* result);

  int32_t size() const;
  const ggml_tensor* node(int32_t index) const;

  /// How often nodes read `tensor`, as the model's code built the graph.
  int32_t readers(const ggml_tensor* tensor) const;

  /// What `tensor` is a copy of, where the scheduler made one for another back end ("CUDA0#name#0"); `tensor`
  /// itself when it is none.
  const ggml_tensor* original(const ggml_tensor* tensor) const;

  /// What the token embeddings, or those in their place, enter the model by; null where the engine does not
  /// say.
  const ggml_tensor* input_embeddings() const;

  /// What the engine gives as embeddings: what its output head reads, where there is one. May be null.
  const ggml_tensor* embeddings() const;

  /// Whether there is an output head. Models that only embed have none.
  bool has_logits() const;

  /// What the engine's own hook gives as the input of a block; null where the architecture has no hook.
  const ggml_tensor* hooked_input(int32_t block) const;

 private:
  const llm_graph_result* result_;
  ggml_cgraph* graph_;
};

}  // namespace llamatap
