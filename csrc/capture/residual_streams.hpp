#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/context/graph.hpp"

struct ggml_tensor;

namespace llamatap {

/// The graph node of a slot.
struct LayerSource {
  std::string node;  // see node_name()
  /// Whether the node has rows for the outputs only: the engine crops the last block.
  bool cropped = false;
  /// Whether the engine's layer-input hook gives the same node.
  bool hooked = false;
};

/// Finds the residual stream in a graph by its readers, not by its name. Block i starts with the nodes that
/// use its first weight. H_i is their input, or a tensor before it (behind reshapes and norms without
/// weights): the furthest one that the residual add also reads and that block i-1 contributed to. H_n is the
/// input of the output norm; without that norm (post-norm encoders), the result of the last block. A model
/// that runs the same blocks several times has a slot for each run.
class ResidualStreams {
 public:
  /// `known`: the sources found in a graph of several tokens, because in a batch of one token other tensors
  /// have the shape of a stream. Null when not known yet.
  ResidualStreams(const Graph& graph, int32_t n_layer, int32_t n_embd, const std::vector<LayerSource>* known);

  /// H_0..H_n, then norm(H_n); null when there is no single stream.
  const std::vector<const ggml_tensor*>& by_slot() const { return found_; }
  /// Whether the last block gives the embeddings: there is no norm(H_n).
  bool ends_without_norm() const { return ends_without_norm_; }
  /// The tensor that the block of a slot reads; null when the graph has no such block.
  const ggml_tensor* nearest(int32_t slot) const { return nearest_[slot]; }

 private:
  /// A node that reads the first weight of a block.
  struct BlockStart {
    int32_t block;
    int32_t node;
    const ggml_tensor* read;
  };

  void visit(int32_t index);
  void visit_output_norm(const ggml_tensor& norm, const ggml_tensor* read);
  void visit_embeddings();
  /// Finds the starts of blocks by the names of their nodes.
  void visit_names();
  void visit_block(const BlockStart& start, int32_t previous);
  bool is_stream(int32_t slot, const ggml_tensor& node) const;

  const Graph& graph_;
  int32_t n_layer_;
  int64_t n_embd_;
  const std::vector<LayerSource>* known_;
  std::vector<const ggml_tensor*> first_weights_;
  std::vector<BlockStart> starts_;
  std::vector<const ggml_tensor*> found_;
  std::vector<const ggml_tensor*> nearest_;
  std::vector<bool> parts_read_;  // by block: whether it reads one of several streams
  bool ends_without_norm_ = false;
};

/// The name of a node; its operation in brackets when the model's code gave it none.
std::string node_name(const ggml_tensor& node);

}  // namespace llamatap
