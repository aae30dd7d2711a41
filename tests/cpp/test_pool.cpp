#include <doctest/doctest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <vector>

#include "capture/pool.hpp"

namespace llamatap {

namespace {

/// The pooled row of these rows, each of two slots of one value.
std::vector<float> pooled(Pooling kind, const std::vector<std::vector<float>>& rows) {
  Pool pool(kind, 2);
  for (const auto& row : rows) {
    pool.take(row.data(), 0, 1);
    pool.take(row.data() + 1, 1, 1);
  }
  std::vector<float> result(2);
  pool.write(rows.size(), DType::f32, reinterpret_cast<std::byte*>(result.data()));
  return result;
}

}  // namespace

TEST_CASE("rows are pooled slot by slot") {
  const std::vector<std::vector<float>> rows{{1, -5}, {4, -1}, {1, -3}};
  CHECK(pooled(Pooling::mean, rows) == std::vector<float>{2, -3});
  CHECK(pooled(Pooling::max, rows) == std::vector<float>{4, -1});
  CHECK(pooled(Pooling::last, rows) == std::vector<float>{1, -3});
}

TEST_CASE("a mean is summed in float64") {
  // In float32, 2^24 + 1 is 2^24.
  const float large = 16777216.0F;
  CHECK(pooled(Pooling::mean, {{large, 0}, {1, 0}, {1, 0}, {2, 0}})[0] == (large + 4) / 4);
}

TEST_CASE("NaN propagates in a maximum") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  CHECK(std::isnan(pooled(Pooling::max, {{nan, 0}, {1, 0}})[0]));
  CHECK(std::isnan(pooled(Pooling::max, {{1, 0}, {nan, 0}})[0]));
}

}  // namespace llamatap
