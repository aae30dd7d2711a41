#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/context.hpp"
#include "engine/graph.hpp"
#include "engine/model.hpp"

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
class Streams {
 public:
  /// `known` are the sources found in a graph of several tokens: a batch of one has tensors that look like
  /// streams and are none. Null when they are not known yet.
  Streams(const Graph& graph, int32_t n_layer, int32_t n_embd, const std::vector<LayerSource>* known);

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

/// Map from each slot of a model to the graph node that gives it: slot i in 0..n is H_i, slot n+1 is
/// norm(H_n).
class LayerMap {
 public:
  /// Builds a small graph of the model and finds the residual stream in it. Throws Unsupported when
  /// a model has none, e.g. when it carries several streams.
  static std::shared_ptr<const LayerMap> resolve(const std::shared_ptr<Model>& model);

  int32_t n_layer() const { return static_cast<int32_t>(sources_.size()) - 2; }
  int32_t n_embd() const { return n_embd_; }
  /// Whether the model keeps a memory of past tokens; one that does not sees a batch at once.
  bool has_memory() const { return has_memory_; }
  /// Whether all of a batch must be computed at once: no memory, or tokens that see later ones.
  bool at_once() const { return at_once_; }
  int32_t norm_slot() const { return n_layer() + 1; }
  /// Whether there is a norm(H_n). Where there is none, its slot has a source without a name.
  bool has_norm() const { return has_norm_; }
  const std::vector<LayerSource>& sources() const { return sources_; }

 private:
  LayerMap(std::vector<LayerSource> sources, int32_t n_embd, const Context& context, bool has_norm)
      : sources_(std::move(sources)),
        n_embd_(n_embd),
        has_memory_(context.has_memory()),
        at_once_(context.at_once()),
        has_norm_(has_norm) {}

  std::vector<LayerSource> sources_;
  int32_t n_embd_;
  bool has_memory_;
  bool at_once_;
  bool has_norm_;
};

}  // namespace llamatap
