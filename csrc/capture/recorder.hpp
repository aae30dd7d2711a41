#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "capture/block.hpp"
#include "capture/dtype.hpp"
#include "capture/layer_map.hpp"
#include "capture/pool.hpp"
#include "engine/context/context.hpp"

namespace llamatap {

/// How states are captured: by the graph callback, which stops between nodes (slow on a GPU); by the engine's
/// layer-input hooks; by copies in the graph. Automatic: hooks on a GPU when all slots have one, else the
/// callback. All give the same bits.
enum class TapWay { automatic, callback, hooks, copies };

/// Target of the states of one batch entry: a row ([n_slots, n_embd]), a pool, or none.
struct RowTarget {
  std::byte* row = nullptr;
  Pool* pool = nullptr;

  bool wanted() const { return row != nullptr || pool != nullptr; }
};

/// Copies captured nodes to their targets row by row, in any computation order.
class Recorder : public DecodeObserver {
 public:
  /// `slots` may repeat, in any order; `targets` has one element per entry of the batch. For hooks, every
  /// slot must have one.
  Recorder(std::shared_ptr<const Model> model, std::shared_ptr<const LayerMap> map,
           std::vector<int32_t> slots, DType dtype, std::vector<RowTarget> targets, TapWay way);

  bool needs_last_block(int32_t row) const override;
  bool stop_keeps_memory() const override;
  bool all_finite() const override { return all_finite_; }
  void begin(const Piece& piece) override;
  void begin_graph(const Graph& graph) override;
  std::vector<int32_t> hooked_layers() const override { return hooked_layers_; }
  void hooked(int32_t layer, const float* values) override;
  internals::CopyWishes copies() override;
  bool wants(const ggml_tensor* node) override;
  bool computed(const ggml_tensor* node) override;
  void end() override;

 private:
  using Wanted = std::vector<std::pair<const ggml_tensor*, int32_t>>::const_iterator;
  std::pair<Wanted, Wanted> slots_of(const ggml_tensor* node) const;
  void copy(int32_t slot, const ggml_tensor& node);
  void check(int32_t slot, const ggml_tensor& node) const;
  [[noreturn]] void throw_rows(int32_t slot) const;
  [[noreturn]] static void throw_missing(int32_t slot);
  /// Writes `count` rows of a slot, `stride` bytes apart, to their targets.
  void deliver(int32_t slot, const char* data, size_t stride, size_t count);
  /// Copies rows of a node from a device straight to their targets, a call for each run of targets that
  /// follow each other. Returns false, having copied nothing, when they are pooled, converted or scattered.
  bool copy_runs(int32_t slot, const ggml_tensor& node);
  const std::vector<int32_t>& rows_of(int32_t slot) const;
  /// Rows of targets that follow each other in memory.
  struct Run {
    size_t first;
    size_t count;
    std::byte* row;
  };
  /// The matrices that copies() wishes for.
  std::vector<std::vector<const ggml_tensor*>> copied(const Graph& graph);
  void fetch(size_t group, size_t count, const internals::FetchRows& fetch);
  std::string copies_key() const;
  ggml_type copies_type() const;
  /// Counts rows of a slot that were received.
  void advance(int32_t slot, size_t count) { next_[slot] += count; }
  /// The next `count` rows of a slot as runs; none when they are pooled or scattered.
  std::optional<std::vector<Run>> runs(int32_t slot, size_t count) const;
  /// Slots whose states have as many rows, side by side in a copy.
  struct Group {
    std::vector<int32_t> slots;
  };
  struct Fetched {
    const Group* group;
    size_t first;  // row of the group
    size_t count;
    std::shared_ptr<Block> block;  // [count, slots, width]; null: at the targets
  };
  void deliver_fetched(const Fetched& fetched);

  std::shared_ptr<const Model> model_;
  std::shared_ptr<const LayerMap> map_;
  std::vector<std::vector<size_t>> columns_;  // by slot: its columns in a target row
  size_t row_bytes_;                          // of a target
  DType dtype_;
  std::vector<RowTarget> targets_;
  bool any_cropped_ = false;
  int32_t last_slot_ = -1;
  TapWay way_;
  bool any_pooled_ = false;
  std::array<Group, 2> groups_;  // all rows; rows of outputs
  std::vector<Fetched> fetched_;
  std::vector<int32_t> hooked_layers_;
  bool all_finite_ = true;

  const Piece* piece_ = nullptr;
  std::vector<size_t> next_;  // by slot: rows of the piece received so far
  std::shared_ptr<Block> staging_;
  std::vector<std::pair<const ggml_tensor*, int32_t>> wanted_;  // (node, slot), sorted
};

}  // namespace llamatap
