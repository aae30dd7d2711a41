#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "capture/recorder.hpp"

namespace llamatap {

/// One prompt of an extraction and where its states go.
struct ExtractJob {
  std::vector<int32_t> tokens;
  int32_t begin = 0;  // the window of positions that is wanted: [begin, end), not empty
  int32_t end = 0;
  Pooling pooling = Pooling::none;
  std::byte* out = nullptr;  // [end - begin, n_slots, n_embd] of the dtype; [n_slots, n_embd] when pooled
};

/// Computes the prompts together, each as a sequence of its own, no further than the last wanted layer,
/// and writes the wanted rows. The context must be empty and is empty afterwards, whatever happens. Returns
/// whether all values are finite; if not, NaN may have spread from one prompt to the others.
bool extract(Context& context, const std::shared_ptr<const LayerMap>& map, const std::vector<int32_t>& slots,
             DType dtype, const std::vector<ExtractJob>& jobs, const Poll& poll);

}  // namespace llamatap
