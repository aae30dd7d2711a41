#pragma once

#include <memory>
#include <vector>

#include "capture/block.hpp"
#include "capture/dtype.hpp"
#include "capture/layer_map.hpp"
#include "capture/recorder.hpp"
#include "engine/context/context.hpp"

namespace llamatap {

/// Slots, dtype and rows to capture in each decode.
struct TapPlan {
  std::vector<int32_t> slots;
  TapWay way = TapWay::automatic;
  DType dtype = DType::f32;
  bool outputs_only = false;
};

struct Tapped {
  std::shared_ptr<Block> block;  // [rows, n_slots, n_embd]
  std::vector<int32_t> rows;     // captured entries of the batch, in batch order
};

/// Decodes the batch, logits included, and captures the planned states.
Tapped decode_tapped(Context& context, const std::shared_ptr<const LayerMap>& map, const TapPlan& plan,
                     const Batch& batch, const Poll& poll);

}  // namespace llamatap
