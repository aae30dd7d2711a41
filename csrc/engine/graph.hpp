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

  /// The tensor that the scheduler copied `tensor` from for another back end ("CUDA0#name#0"); `tensor`
  /// itself when it is no copy.
  const ggml_tensor* original(const ggml_tensor* tensor) const;

  /// The tensor by which the token embeddings, or embeddings given in their place, enter the model; null
  /// where the engine does not say.
  const ggml_tensor* input_embeddings() const;

  /// The tensor that the engine gives as embeddings: the input of its output head, where there is one. May be
  /// null.
  const ggml_tensor* embeddings() const;

  /// Whether there is an output head. Models that only embed have none.
  bool has_logits() const;

  /// The input of a block, as the engine's own hook gives it; null where the architecture has no hook.
  const ggml_tensor* hooked_input(int32_t block) const;

 private:
  const llm_graph_result* result_;
  ggml_cgraph* graph_;
};

}  // namespace llamatap
