#pragma once

#include <cstdint>

#include "engine/context/context.hpp"

namespace llamatap {

/// Stops a single-block decode once its keys and values are stored; skips attention, feed-forward and output
/// head.
class StoreOnly : public DecodeObserver {
 public:
  bool needs_last_block(int32_t) const override { return false; }
  bool stop_keeps_memory() const override { return true; }
  bool all_finite() const override { return true; }
  void begin(const Piece& piece) override { may_stop_ = piece.may_stop; }
  void begin_graph(const Graph& graph) override;
  bool wants(const ggml_tensor* node) override { return node == last_store_; }
  bool computed(const ggml_tensor*) override { return !may_stop_; }
  void end() override {}

 private:
  const ggml_tensor* last_store_ = nullptr;
  bool may_stop_ = false;
};

}  // namespace llamatap
