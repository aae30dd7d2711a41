#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace llamatap {

/// Which positions a sequence holds: disjoint half-open ranges, rising. The engine tells the first and the
/// last one alone.
class Positions {
 public:
  struct Range {
    int64_t begin;
    int64_t end;
  };

  bool empty() const { return ranges_.empty(); }
  int64_t first() const { return ranges_.front().begin; }
  int64_t last() const { return ranges_.back().end - 1; }
  const std::vector<Range>& ranges() const { return ranges_; }

  int64_t count() const {
    int64_t total = 0;
    for (const auto& range : ranges_) total += range.end - range.begin;
    return total;
  }

  bool overlaps(Range other) const {
    return std::any_of(ranges_.begin(), ranges_.end(),
                       [&](Range range) { return range.begin < other.end && other.begin < range.end; });
  }

  void remove(Range gone) {
    std::vector<Range> left;
    for (const auto& range : ranges_) {
      const Range before{range.begin, std::min(range.end, gone.begin)};
      const Range after{std::max(range.begin, gone.end), range.end};
      if (before.begin < before.end) left.push_back(before);
      if (after.begin < after.end) left.push_back(after);
    }
    ranges_ = std::move(left);
  }

  void add(Range more) {
    if (more.begin >= more.end) return;
    remove(more);
    ranges_.push_back(more);
    std::sort(ranges_.begin(), ranges_.end(), [](Range a, Range b) { return a.begin < b.begin; });
    std::vector<Range> joined;
    for (const auto& range : ranges_) {
      if (!joined.empty() && joined.back().end == range.begin) {
        joined.back().end = range.end;
      } else {
        joined.push_back(range);
      }
    }
    ranges_ = std::move(joined);
  }

  /// The part that lies in a range.
  Positions within(Range range) const {
    Positions part = *this;
    part.remove({INT64_MIN, range.begin});
    part.remove({range.end, INT64_MAX});
    return part;
  }

 private:
  std::vector<Range> ranges_;
};

}  // namespace llamatap
