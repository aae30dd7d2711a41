#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "capture/recorder.hpp"

namespace llamatap {

/// A prompt to extract from, and the memory for its states.
struct ExtractJob {
  std::vector<int32_t> tokens;
  int32_t begin = 0;  // wanted positions: [begin, end), not empty
  int32_t end = 0;
  Pooling pooling = Pooling::none;
  std::byte* out = nullptr;  // [end - begin, n_slots, n_embd]; [n_slots, n_embd] when pooled
};

/// Computes the prompts in one batch, each as its own sequence, up to the last wanted layer, and writes the
/// wanted rows. The context must be empty and is empty afterwards, also on error. Returns whether all values
/// are finite; if not, NaN may have spread between prompts.
bool extract(Context& context, const std::shared_ptr<const LayerMap>& map, const std::vector<int32_t>& slots,
             DType dtype, const std::vector<ExtractJob>& jobs, TapWay way, const Poll& poll);

}  // namespace llamatap
