#include "capture/extract.hpp"

#include "engine/error.hpp"

namespace llamatap {

bool extract(Context& context, const std::shared_ptr<const LayerMap>& map, const std::vector<int32_t>& slots,
             DType dtype, const std::vector<ExtractJob>& jobs, TapWay way, const Poll& poll) {
  const size_t row_bytes = slots.size() * static_cast<size_t>(map->n_embd()) * item_size(dtype);
  const bool past_only = context.causal() && context.has_memory();

  Batch batch;
  std::vector<RowTarget> targets;
  std::vector<std::unique_ptr<Pool>> pools;
  for (size_t seq = 0; seq < jobs.size(); ++seq) {
    const auto& job = jobs[seq];
    const auto length = static_cast<int32_t>(job.tokens.size());
    if (job.begin < 0 || job.begin >= job.end || job.end > length) {
      throw InvalidInput("window [" + std::to_string(job.begin) + ", " + std::to_string(job.end) +
                         ") is outside of a prompt of " + std::to_string(length) + " tokens");
    }
    // Last-token pooling needs one row; the others skip the last block.
    const int32_t begin = job.pooling == Pooling::last ? job.end - 1 : job.begin;
    Pool* pool = nullptr;
    if (job.pooling != Pooling::none) {
      pools.push_back(std::make_unique<Pool>(job.pooling, slots.size() * static_cast<size_t>(map->n_embd())));
      pool = pools.back().get();
    }
    // With causal attention, tokens after the window cannot change it.
    const int32_t computed = past_only ? job.end : length;
    for (int32_t position = 0; position < computed; ++position) {
      batch.add(job.tokens[position], position, {static_cast<int32_t>(seq)}, false);
      RowTarget target;
      if (position >= begin && position < job.end) {
        target.pool = pool;
        if (pool == nullptr) target.row = job.out + static_cast<size_t>(position - job.begin) * row_bytes;
      }
      targets.push_back(target);
    }
  }

  Recorder recorder(context.model(), map, slots, dtype, std::move(targets), way);
  context.decode_scratch(batch, recorder, poll);
  size_t next = 0;
  for (const auto& job : jobs) {
    if (job.pooling == Pooling::none) continue;
    pools[next++]->write(static_cast<size_t>(job.end - job.begin), dtype, job.out);
  }
  return recorder.all_finite();
}

}  // namespace llamatap
