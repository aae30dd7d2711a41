#include "capture/tap.hpp"

#include <algorithm>

#include "capture/block_pool.hpp"
#include "capture/recorder.hpp"

namespace llamatap {

namespace {

TapWay way_of(const Context& context, const LayerMap& map, const TapPlan& plan, const Batch& batch) {
  if (plan.way != TapWay::automatic) return plan.way;
  // Embeddings in place of tokens may enter by a node without a hook.
  if (!context.model()->on_gpu() || batch.has_embeddings()) return TapWay::callback;
  const bool hooked = std::all_of(plan.slots.begin(), plan.slots.end(), [&](int32_t slot) {
    return map.sources().at(static_cast<size_t>(slot)).hooked;
  });
  return hooked ? TapWay::hooks : TapWay::callback;
}

}  // namespace

Tapped decode_tapped(Context& context, const std::shared_ptr<const LayerMap>& map, const TapPlan& plan,
                     const Batch& batch, const Poll& poll) {
  Tapped tapped;
  for (int32_t row = 0; row < batch.size(); ++row) {
    if (!plan.outputs_only || batch.outputs()[row]) tapped.rows.push_back(row);
  }
  const size_t row_bytes = plan.slots.size() * static_cast<size_t>(map->n_embd()) * item_size(plan.dtype);
  tapped.block = block_for(*context.model(), tapped.rows.size() * row_bytes);
  std::vector<RowTarget> targets(static_cast<size_t>(batch.size()));
  for (size_t i = 0; i < tapped.rows.size(); ++i) {
    targets[tapped.rows[i]].row = tapped.block->data() + i * row_bytes;
  }
  Recorder recorder(context.model(), map, plan.slots, plan.dtype, std::move(targets),
                    way_of(context, *map, plan, batch));
  context.decode(batch, &recorder, poll);
  return tapped;
}

}  // namespace llamatap
