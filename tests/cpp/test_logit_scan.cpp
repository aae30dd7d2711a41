#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "engine/logit_scan.hpp"

namespace llamatap {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> random_logits(std::mt19937& random, int32_t n, float scale) {
  std::normal_distribution<float> normal(0, 1);
  std::vector<float> logits(static_cast<size_t>(n));
  for (float& logit : logits) logit = random() % 50 == 0 ? -kInfinity : scale * normal(random);
  logits[random() % logits.size()] = 3 * scale;
  return logits;
}

}  // namespace

TEST_CASE("the range of logits, and the first of the largest") {
  const std::vector<float> logits{-3, 2, -kInfinity, 2, -7};
  const LogitRange range = logit_range(logits.data(), 5);
  CHECK(range.usable);
  CHECK(range.largest == 2);
  CHECK(range.largest_absolute == 7);
  CHECK(first_largest(logits.data(), 5, 2) == 1);
  for (const int32_t n : {1, 15, 16, 17, 100}) {
    for (int32_t at = 0; at < n; ++at) {
      std::vector<float> one(static_cast<size_t>(n), -5.0F);
      one[at] = 3;
      if (at + 1 < n) one[at + 1] = 3;
      CHECK(logit_range(one.data(), n).largest == 3);
      CHECK(first_largest(one.data(), n, 3) == at);
      for (const float bad : {kInfinity, std::numeric_limits<float>::quiet_NaN()}) {
        one[at] = bad;
        CHECK_FALSE(logit_range(one.data(), n).usable);
      }
    }
  }
  const std::vector<float> nothing(20, -kInfinity);
  CHECK_FALSE(logit_range(nothing.data(), 20).usable);
}

TEST_CASE("a draw is the one of the engine's arithmetic, also at the borders between tokens") {
  std::mt19937 random(1);
  std::uniform_real_distribution<double> uniform(0, 1);
  for (const int32_t n : {1, 2, 63, 64, 65, 259, 5000}) {
    for (const float scale : {0.0F, 0.01F, 1.0F, 4.0F, 30.0F, 1000.0F}) {
      for (const float temperature : {0.05F, 0.8F, 1.0F, 3.0F}) {
        CAPTURE(n);
        CAPTURE(scale);
        CAPTURE(temperature);
        const auto logits = random_logits(random, n, scale);
        const float largest = logit_range(logits.data(), n).largest;
        const auto same = [&](double point) {
          return draw_softmax(logits.data(), n, largest, temperature, point) ==
                 draw_softmax_exactly(logits.data(), n, largest, temperature, point);
        };
        for (int32_t round = 0; round < 20; ++round) CHECK(same(uniform(random)));
        CHECK(same(0));
        CHECK(same(std::nextafter(1.0, 0.0)));
        double total = 0;
        std::vector<double> ends;
        for (const float logit : logits) {
          ends.push_back(total += double{std::exp(logit / temperature - largest / temperature)});
        }
        for (int32_t round = 0; round < 50; ++round) {
          const double border = ends[random() % ends.size()] / total;
          for (const double away : {0.0, 1e-12, -1e-12, 1e-7, -1e-7, 1e-6, -1e-6, 3e-6, -3e-6}) {
            if (border + away >= 0 && border + away < 1) REQUIRE(same(border + away));
          }
        }
      }
    }
  }
}

TEST_CASE("draws follow softmax") {
  const std::vector<float> logits{0, 1, 2};
  std::mt19937 random(3);
  std::uniform_real_distribution<double> uniform(0, 1);
  std::vector<int32_t> counts(3);
  for (int32_t i = 0; i < 20000; ++i) ++counts[draw_softmax(logits.data(), 3, 2, 0.5F, uniform(random))];
  const double total = std::exp(0.0) + std::exp(2.0) + std::exp(4.0);
  for (int32_t i = 0; i < 3; ++i) {
    CHECK(counts[i] / 20000.0 == doctest::Approx(std::exp(2.0 * i) / total).epsilon(0.1));
  }
}

}  // namespace llamatap
