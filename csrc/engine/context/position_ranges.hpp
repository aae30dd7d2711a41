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

/// The positions of a sequence's tokens, rising: in layers that see everything, and in those with sliding
/// windows, which drop what no window reaches any more. The same where there are no windows.
struct HeldPositions {
  std::vector<int32_t> all;
  std::vector<int32_t> windows;

  void remove(PositionRange range);
  void add(const HeldPositions& others, PositionRange range);
  /// Whether the windows have all that the tokens of a sequence that goes on from here may see.
  bool reach_back(int32_t window) const;
};

}  // namespace llamatap
