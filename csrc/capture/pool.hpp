#pragma once

#include <cstddef>
#include <vector>

#include "capture/dtype.hpp"

namespace llamatap {

enum class Pooling { none, mean, last, max };

/// Pools rows as they are captured. Means are summed in float64, so that the order of rows hardly matters.
class Pool {
 public:
  Pool(Pooling kind, size_t width);

  /// Adds one row of one slot: `count` values at `offset` of the pooled row.
  void take(const float* values, size_t offset, size_t count);
  /// Writes the result of `rows` rows.
  void write(size_t rows, DType dtype, std::byte* target) const;

 private:
  Pooling kind_;
  std::vector<double> values_;
};

}  // namespace llamatap
