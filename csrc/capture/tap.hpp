#pragma once

#include <memory>
#include <vector>

#include "capture/block.hpp"
#include "capture/dtype.hpp"
#include "capture/layer_map.hpp"
#include "engine/context/context.hpp"

namespace llamatap {

/// The way by which states leave the graph: the engine's hooks where all slots have one and the model is on a
/// GPU, where stopping between nodes costs; the graph's callback elsewhere. Both give the same bits.
enum class TapWay { automatic, callback, hooks };

/// The request of a tap: slots, dtype and rows to capture in each decode.
struct TapPlan {
  std::vector<int32_t> slots;
  TapWay way = TapWay::automatic;
  DType dtype = DType::f32;
  bool outputs_only = false;
};

struct Tapped {
  std::shared_ptr<Block> block;  // [rows, n_slots, n_embd]
  std::vector<int32_t> rows;     // the entries of the batch that have a row, in batch order
};

/// Decodes the batch, logits included, and captures the states that the plan names.
Tapped decode_tapped(Context& context, const std::shared_ptr<const LayerMap>& map, const TapPlan& plan,
                     const Batch& batch, const Poll& poll);

}  // namespace llamatap
