#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "capture/block.hpp"
#include "capture/dtype.hpp"
#include "capture/layer_map.hpp"
#include "capture/pool.hpp"
#include "engine/context/context.hpp"

namespace llamatap {

/// Target of the states of one batch entry: a row ([n_slots, n_embd]), a pool, or none.
struct RowTarget {
  std::byte* row = nullptr;
  Pool* pool = nullptr;

  bool wanted() const { return row != nullptr || pool != nullptr; }
};

/// Copies captured nodes to their targets row by row, in any computation order.
class Recorder : public DecodeObserver {
 public:
  /// `slots` may repeat, in any order; `targets` has one element per entry of the batch. `by_hooks`: capture
  /// by layer-input hooks; every slot must have one.
  Recorder(std::shared_ptr<const Model> model, std::shared_ptr<const LayerMap> map,
           std::vector<int32_t> slots, DType dtype, std::vector<RowTarget> targets, bool by_hooks = false);

  bool needs_last_block(int32_t row) const override;
  bool stop_keeps_memory() const override;
  bool all_finite() const override { return all_finite_; }
  void begin(const Piece& piece) override;
  void begin_graph(const Graph& graph) override;
  std::vector<int32_t> hooked_layers() const override { return hooked_layers_; }
  void hooked(int32_t layer, const float* values) override;
  bool wants(const ggml_tensor* node) override;
  bool computed(const ggml_tensor* node) override;
  void end() override;

 private:
  using Wanted = std::vector<std::pair<const ggml_tensor*, int32_t>>::const_iterator;
  std::pair<Wanted, Wanted> slots_of(const ggml_tensor* node) const;
  void copy(int32_t slot, const ggml_tensor& node);
  /// Writes `count` rows of a slot, `stride` bytes apart, to their targets.
  void deliver(int32_t slot, const char* data, size_t stride, size_t count);
  /// Copies rows of a node from a device straight to their targets, a call for each run of targets that
  /// follow each other. Returns false, having copied nothing, when they are pooled, converted or scattered.
  bool copy_runs(int32_t slot, const ggml_tensor& node);
  const std::vector<int32_t>& rows_of(int32_t slot) const;

  std::shared_ptr<const Model> model_;
  std::shared_ptr<const LayerMap> map_;
  std::vector<std::vector<size_t>> columns_;  // by slot: its columns in a target row
  size_t row_bytes_;                          // of a target
  DType dtype_;
  std::vector<RowTarget> targets_;
  bool any_cropped_ = false;
  int32_t last_slot_ = -1;
  std::vector<int32_t> hooked_layers_;
  bool all_finite_ = true;

  const Piece* piece_ = nullptr;
  std::vector<size_t> next_;  // by slot: rows of the piece received so far
  std::shared_ptr<Block> staging_;
  std::vector<std::pair<const ggml_tensor*, int32_t>> wanted_;  // (node, slot), sorted
};

}  // namespace llamatap
