#include "capture/pool.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

namespace llamatap {

Pool::Pool(Pooling kind, size_t width)
    : kind_(kind), values_(width, kind == Pooling::max ? -std::numeric_limits<double>::infinity() : 0.0) {}

void Pool::take(const float* values, size_t offset, size_t count) {
  double* pooled = values_.data() + offset;
  switch (kind_) {
    case Pooling::mean:
      for (size_t i = 0; i < count; ++i) pooled[i] += double{values[i]};
      break;
    case Pooling::max:
      // NaN propagates, as in NumPy.
      for (size_t i = 0; i < count; ++i) {
        if (values[i] > pooled[i] || std::isnan(values[i])) pooled[i] = double{values[i]};
      }
      break;
    case Pooling::last:
    case Pooling::none: std::copy(values, values + count, pooled); break;
  }
}

void Pool::write(size_t rows, DType dtype, std::byte* target) const {
  const double divisor = kind_ == Pooling::mean ? static_cast<double>(rows) : 1.0;
  std::vector<float> row(values_.size());
  std::transform(values_.begin(), values_.end(), row.begin(),
                 [&](double value) { return static_cast<float>(value / divisor); });
  write_values(row.data(), row.size(), dtype, target);
}

}  // namespace llamatap
