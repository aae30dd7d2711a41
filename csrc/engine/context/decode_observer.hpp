#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "engine/context/batch_plan.hpp"
#include "engine/context/graph.hpp"

struct ggml_tensor;

namespace llamatap {

/// Receives the states of a decode, in one of two ways. The graph callback passes each node as it is
/// computed, and can stop the decode. The engine's hooks copy the inputs of layers without stops between
/// nodes: faster on a GPU. Methods run on the computing thread, without the GIL. Exceptions stop the decode,
/// which rethrows them outside of the engine's frames.
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
  /// Whether nodes in the graph copy the states; then the callback is not used.
  virtual bool by_copies() const { return false; }
  /// Tells copies of one kind from those of another.
  virtual std::string copies_key() const { return {}; }
  virtual ggml_type copies_type() const { return GGML_TYPE_F32; }
  /// The matrices to copy, in groups of as many rows, from a graph that was built and is not computed yet.
  virtual std::vector<std::vector<const ggml_tensor*>> copied(const Graph& /*graph*/) { return {}; }
  /// Asks for the rows of a group, [count, matrices, width], once their computation has begun: they are there
  /// when the engine call ends.
  using Fetch = std::function<void(std::byte* target, size_t row, size_t count)>;
  virtual void fetch(size_t /*group*/, size_t /*count*/, const Fetch& /*fetch*/) {}
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
