#include "engine/context/position_ranges.hpp"

#include <algorithm>
#include <iterator>

namespace llamatap {

void HeldPositions::remove(PositionRange range) {
  for (auto* of_layers : {&all, &windows}) {
    of_layers->erase(std::remove_if(of_layers->begin(), of_layers->end(),
                                    [&](int32_t position) { return range.contains(position); }),
                     of_layers->end());
  }
}

void HeldPositions::add(const HeldPositions& others, PositionRange range) {
  const auto merge = [&](std::vector<int32_t>& ours, const std::vector<int32_t>& theirs) {
    std::copy_if(theirs.begin(), theirs.end(), std::back_inserter(ours),
                 [&](int32_t position) { return range.contains(position); });
    std::sort(ours.begin(), ours.end());
  };
  merge(all, others.all);
  merge(windows, others.windows);
}

bool HeldPositions::reach_back(int32_t window) const {
  if (windows.size() > all.size()) return false;
  const auto n_dropped = static_cast<std::ptrdiff_t>(all.size() - windows.size());
  // Only the first positions may be missing.
  if (!std::equal(windows.begin(), windows.end(), all.begin() + n_dropped)) return false;
  return n_dropped == 0 || int64_t{all[n_dropped - 1]} < int64_t{all.back()} + 1 - window;
}

}  // namespace llamatap
