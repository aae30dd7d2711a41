#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "engine/context/graph.hpp"

struct ggml_tensor;

namespace llamatap {

/// A node that the engine computes: the name that the model's code gave it, its operation where it gave none.
struct LayerSource {
  std::string node;
  /// Whether the node has rows for the outputs of a batch only: the engine crops the last block.
  bool cropped = false;
  /// Whether the engine's own hook for the input of this layer gives the same node.
  bool hooked = false;
};

/// The residual stream in a graph, found by what reads it and not by its name. The first nodes of block i are
/// those that use the weight of it that comes first. H_i is what they read or what lies before that behind
/// norms without weights and reshapes; of these, the furthest that the residual add reads too and that block
/// i-1 had a part in. H_n is what the output norm reads; without such a norm (post-norm encoders, whose
/// blocks end in norms of their own), what the last block gives. A model that runs through the same blocks
/// several times has a slot for each run.
class ResidualStreams {
 public:
  /// `known` are the sources found in a graph of several tokens: a batch of one has tensors that look like
  /// streams and are none. Null when they are not known yet.
  ResidualStreams(const Graph& graph, int32_t n_layer, int32_t n_embd, const std::vector<LayerSource>* known);

  /// H_0..H_n, then norm(H_n); null where there is no single stream.
  const std::vector<const ggml_tensor*>& by_slot() const { return found_; }
  /// Whether the last block gives the embeddings itself: there is no norm(H_n).
  bool ends_without_norm() const { return ends_without_norm_; }
  /// The tensor that the block of a slot was seen to read; null when the graph has no such block.
  const ggml_tensor* nearest(int32_t slot) const { return nearest_[slot]; }

 private:
  /// A node that reads the first weight of a block.
  struct BlockStart {
    int32_t block;
    int32_t node;
    const ggml_tensor* read;
  };

  void see(int32_t index);
  void see_output_norm(const ggml_tensor& norm, const ggml_tensor* read);
  void see_embeddings();
  /// The starts of blocks by the names of their nodes.
  void see_names();
  void see_block(const BlockStart& start, int32_t previous);
  bool is_stream(int32_t slot, const ggml_tensor& node) const;

  const Graph& graph_;
  int32_t n_layer_;
  int64_t n_embd_;
  const std::vector<LayerSource>* known_;
  std::vector<const ggml_tensor*> first_weights_;
  std::vector<BlockStart> starts_;
  std::vector<const ggml_tensor*> found_;
  std::vector<const ggml_tensor*> nearest_;
  std::vector<bool> parts_read_;  // by block: whether its first read is of one of several streams
  bool ends_without_norm_ = false;
};

/// The name that the model's code gave to a node; its operation in brackets where it gave none.
std::string node_name(const ggml_tensor& node);

}  // namespace llamatap
