#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "engine/context.hpp"
#include "engine/model.hpp"

struct ggml_tensor;

namespace llamatap {

/// The name of a tensor; that of what it is a copy of for a copy on another back end ("CUDA0#name#0").
std::string_view original_name(const ggml_tensor* tensor);

/// The same, but "" for a name that ggml numbered, differently in each graph.
std::string given_name(const ggml_tensor* tensor);

/// How a node of the engine's graphs is recognised. Names alone are not unique in every architecture.
struct NodeSignature {
  std::string name;
  int32_t op = 0;
  std::string source0;
  std::string source1;

  static NodeSignature of(const ggml_tensor& node);
  bool matches(const ggml_tensor& node) const;
};

struct LayerSource {
  NodeSignature node;
  /// Whether the node has rows for the outputs of a batch only: the engine crops the last block.
  bool cropped = false;
};

/// Finds the residual stream in a graph by what reads it, not by its name. The input of block i is among
/// what the first node that uses a weight of block i reads: that itself, or what lies before norms without
/// weights and reshapes. H_n is found the same way from the output norm, known by its weight or, without
/// one, by its name. Nodes are shown in the order of computation. Copies between back ends stand for what
/// they are copies of.
class StreamFinder {
 public:
  using Chain = std::vector<const ggml_tensor*>;

  StreamFinder(int32_t n_layer, int64_t n_embd);

  void reset();
  void see(const ggml_tensor* node);

  /// What `tensor` is a copy of, among the nodes seen; `tensor` itself when it is no copy.
  const ggml_tensor* original(const ggml_tensor* tensor) const;

  /// For H_0..H_n, then norm(H_n): the tensors that it may be, nearest to the reader first.
  const std::vector<Chain>& chains() const { return chains_; }

 private:
  Chain trace(const ggml_tensor* node) const;
  void see_norm(const ggml_tensor* node);

  int64_t n_embd_;
  std::vector<Chain> chains_;
  std::vector<const ggml_tensor*> nodes_;
};

/// Which node of the graph gives each slot of a model: slot i in 0..n is H_i, slot n+1 is norm(H_n).
class LayerMap {
 public:
  /// Builds a small graph of the model and finds the residual stream in it. Throws Unsupported when
  /// a model has none, e.g. when it carries several streams.
  static std::shared_ptr<const LayerMap> resolve(const std::shared_ptr<Model>& model);

  int32_t n_layer() const { return static_cast<int32_t>(sources_.size()) - 2; }
  int32_t n_embd() const { return n_embd_; }
  /// Whether the model keeps a memory of past tokens; one that does not sees a batch at once.
  bool has_memory() const { return has_memory_; }
  int32_t norm_slot() const { return n_layer() + 1; }
  const std::vector<LayerSource>& sources() const { return sources_; }

 private:
  LayerMap(std::vector<LayerSource> sources, int32_t n_embd, bool has_memory)
      : sources_(std::move(sources)), n_embd_(n_embd), has_memory_(has_memory) {}

  std::vector<LayerSource> sources_;
  int32_t n_embd_;
  bool has_memory_;
};

}  // namespace llamatap
