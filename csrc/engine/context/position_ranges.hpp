#pragma once

#include <cstdint>
#include <vector>

namespace llamatap {

/// Positions [begin, end).
struct PositionRange {
  int64_t begin;
  int64_t end;
  bool contains(int64_t position) const { return begin <= position && position < end; }
};

/// Sorted positions of a sequence's tokens: in layers with full attention, and in layers with sliding
/// windows, which drop tokens that no window reaches any more. Equal when there are no windows.
struct HeldPositions {
  std::vector<int32_t> all;
  std::vector<int32_t> windows;

  void remove(PositionRange range);
  void add(const HeldPositions& others, PositionRange range);
  /// Whether the windows hold all that the next tokens of the sequence may see.
  bool reach_back(int32_t window) const;
};

}  // namespace llamatap
