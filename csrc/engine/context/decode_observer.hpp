#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/batch_plan.hpp"
#include "engine/context/graph.hpp"

struct ggml_tensor;

namespace llamatap {

/// Sees the states of a decode. Through the graph's callback: node by node, while they are computed, with the
/// choice to end there. Or through the engine's hooks, which copy the inputs of layers without a stop between
/// nodes: cheaper on a GPU. Its methods run on the thread that computes, without
/// the GIL. Their exceptions end the decode, which rethrows them outside of the engine's frames.
class DecodeObserver {
 public:
  virtual ~DecodeObserver() = default;
  /// Whether the whole last block must be computed for the entry `row` of the batch, output or not.
  virtual bool needs_last_block(int32_t row) const = 0;
  /// Whether ending a piece after the last wanted node leaves nothing uncomputed that the memory keeps.
  virtual bool stop_keeps_memory() const = 0;
  /// Whether all values seen so far are finite.
  virtual bool all_finite() const = 0;
  virtual void begin(const Piece& piece) = 0;
  /// The layers whose inputs the hooks copy; LayerSource::hooked must be set for each. If there are any, the
  /// callback is not used.
  virtual const std::vector<int32_t>& hooked_layers() const = 0;
  /// After a piece: the inputs of a hooked layer, [piece.rows, n_embd].
  virtual void hooked(int32_t layer, const float* values) = 0;
  /// The nodes that follow are those of `graph`: a piece is computed as one or more ubatches.
  virtual void begin_graph(const Graph& graph) = 0;
  /// Before `node` is computed: whether `computed` shall be called with it.
  virtual bool wants(const ggml_tensor* node) = 0;
  /// After it was; false when the rest of the piece need not be computed.
  virtual bool computed(const ggml_tensor* node) = 0;
  /// After the piece. Throws when not all was seen.
  virtual void end() = 0;
};

}  // namespace llamatap
