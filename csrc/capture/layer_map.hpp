#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "capture/residual_streams.hpp"
#include "engine/context/context.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

/// Maps each slot of a model to its graph node: slot i in 0..n is H_i, slot n+1 is norm(H_n).
class LayerMap {
 public:
  /// Builds a small graph of the model and finds its residual stream. Throws Unsupported when there is not
  /// exactly one.
  static std::shared_ptr<const LayerMap> resolve(const std::shared_ptr<Model>& model);

  int32_t n_layer() const { return static_cast<int32_t>(sources_.size()) - 2; }
  int32_t n_embd() const { return n_embd_; }
  /// Whether the model keeps a memory of past tokens.
  bool has_memory() const { return has_memory_; }
  /// Whether a batch must be computed at once: no memory, or attention that is not causal.
  bool at_once() const { return at_once_; }
  int32_t norm_slot() const { return n_layer() + 1; }
  /// Whether there is a norm(H_n). If not, the name of its source is empty.
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
