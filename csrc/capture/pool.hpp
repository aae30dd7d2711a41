#pragma once

#include <cstddef>
#include <vector>

#include "capture/dtype.hpp"

namespace llamatap {

enum class Pooling { none, mean, last, max };

/// Pools rows as they are captured: float64 sums for the mean, so that it does not depend on how
/// a prompt was cut into batches more than the rows themselves do.
class Pool {
 public:
  Pool(Pooling kind, size_t width);

  /// One row of one slot: `count` values at `offset` of the pooled row.
  void take(const float* values, size_t offset, size_t count);
  void write(size_t rows, DType dtype, std::byte* target) const;

 private:
  Pooling kind_;
  std::vector<double> values_;
};

}  // namespace llamatap
