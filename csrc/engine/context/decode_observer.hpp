#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/batch_plan.hpp"
#include "engine/context/graph.hpp"
#include "engine/private/graph_copies.hpp"

struct ggml_tensor;

namespace llamatap {

/// Receives the states of a decode, in one of three ways. The graph callback passes each node as it is
/// computed, and can stop the decode. Nodes that are added to the graph copy states without a stop. The
/// engine's hooks copy the inputs of layers without stops between nodes: faster on a GPU. Methods run on the
/// computing thread, without the GIL. Exceptions stop the decode, which rethrows them outside of the engine's
/// frames.
class DecodeObserver {
 public:
  virtual ~DecodeObserver() = default;
  /// Whether the entry `row` of the batch must pass through the last block, output or not.
  virtual bool needs_last_block(int32_t row) const = 0;
  /// Whether the memory is complete when a piece stops after the last wanted node.
  virtual bool stop_keeps_memory() const = 0;
  /// Whether all values seen so far are finite.
  virtual bool all_finite() const = 0;
  virtual void begin(const Piece& piece) = 0;
  /// Layers whose inputs the hooks copy; LayerSource::hooked must be set for each. If not empty, the callback
  /// is not used.
  virtual std::vector<int32_t> hooked_layers() const { return {}; }
  /// Called after a piece with the inputs of a hooked layer, [piece.rows, n_embd].
  virtual void hooked(int32_t /*layer*/, const float* /*values*/) {}
  /// The states that nodes in the graph copy; none: the callback passes them. Valid for the decode.
  virtual internals::CopyWishes copies() { return {}; }
  /// Called before the nodes of each ubatch; a piece is one or more ubatches.
  virtual void begin_graph(const Graph& graph) = 0;
  /// Before `node` is computed: whether to call computed() with it.
  virtual bool wants(const ggml_tensor* node) = 0;
  /// After `node` was computed; returns false when the rest of the piece is not needed.
  virtual bool computed(const ggml_tensor* node) = 0;
  /// Called after a piece. Throws when rows are missing.
  virtual void end() = 0;
};

}  // namespace llamatap
