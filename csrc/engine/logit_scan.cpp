#include "engine/logit_scan.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <limits>
#include <vector>

// The package is built for any x86-64; on most CPUs AVX2 halves the time.
#if defined(__GNUC__) && defined(__x86_64__)
#define LLAMATAP_INLINE inline __attribute__((always_inline))
#define LLAMATAP_HAS_AVX2_COPY
#else
#define LLAMATAP_INLINE inline
#endif

namespace llamatap {

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

/// Independent lanes, which compilers turn into vector instructions.
constexpr int32_t kLanes = 16;
constexpr int32_t kBlock = 64;

/// Bound on the error of a sum of approximate exponentials, in relation to the sum of all: that of each is
/// below 3e-7, and so is that of adding four of them in float32.
constexpr double kMaxError = 2e-6;

/// exp(logits[i] / temperature - largest) for the first n of a block, 0 for the rest.
LLAMATAP_INLINE void exponentials(const float* logits, int32_t n, float temperature, float largest,
                                  float* result) {
  constexpr float kRound = 12582912.0F;  // 1.5 * 2^23: adding it rounds to an integer
  float x[kBlock];
  int32_t bits[kBlock];
  for (int32_t i = 0; i < n; ++i) {
    const float one = logits[i] / temperature - largest;
    // exp(-87) is 1e-38: nothing beside a sum of at least 1.
    x[i] = one > -87.0F ? one : -87.0F;
  }
  for (int32_t i = n; i < kBlock; ++i) x[i] = -87.0F;
  for (int32_t i = 0; i < kBlock; ++i) {
    const float power = (x[i] * 1.44269504F + kRound) - kRound;
    const float r = (x[i] - power * 0.693359375F) + power * 2.12194440e-4F;
    float p = 1.9875691500e-4F;
    p = p * r + 1.3981999507e-3F;
    p = p * r + 8.3334519073e-3F;
    p = p * r + 4.1665795894e-2F;
    p = p * r + 1.6666665459e-1F;
    p = p * r + 5.0000001201e-1F;
    x[i] = p * r * r + r + 1.0F;
    bits[i] = (static_cast<int32_t>(power) + 127) << 23;
  }
  float scale[kBlock];
  std::memcpy(scale, bits, sizeof(scale));
  for (int32_t i = 0; i < kBlock; ++i) result[i] = x[i] * scale[i];
  for (int32_t i = n; i < kBlock; ++i) result[i] = 0;
}

LLAMATAP_INLINE LogitRange range_of(const float* logits, int32_t n) {
  float largest[kLanes];
  float absolute[kLanes];
  int32_t unusable[kLanes];
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    largest[lane] = -kInfinity;
    absolute[lane] = -1;
    unusable[lane] = 0;
  }
  const auto see = [&](int32_t lane, float logit) {
    largest[lane] = logit > largest[lane] ? logit : largest[lane];
    // -infinity excludes a token.
    const float size = logit > -kInfinity ? std::fabs(logit) : -1.0F;
    absolute[lane] = size > absolute[lane] ? size : absolute[lane];
    unusable[lane] |= static_cast<int32_t>(!(logit < kInfinity));  // NaN too
  };
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int32_t lane = 0; lane < kLanes; ++lane) see(lane, logits[i + lane]);
  }
  for (; i < n; ++i) see(0, logits[i]);
  LogitRange range{-kInfinity, -1, true};
  for (int32_t lane = 0; lane < kLanes; ++lane) {
    range.largest = std::max(range.largest, largest[lane]);
    range.largest_absolute = std::max(range.largest_absolute, absolute[lane]);
    range.usable = range.usable && unusable[lane] == 0;
  }
  range.usable = range.usable && range.largest_absolute >= 0;
  return range;
}

/// The sums of the exponentials up to the end of each block.
LLAMATAP_INLINE void sum_blocks(const float* logits, int32_t n, float temperature, float largest,
                                double* ends) {
  double total = 0;
  for (int32_t first = 0; first < n; first += kBlock) {
    float probs[kBlock];
    exponentials(logits + first, std::min(kBlock, n - first), temperature, largest, probs);
    float lanes[kLanes];
    for (int32_t lane = 0; lane < kLanes; ++lane) {
      lanes[lane] =
          (probs[lane] + probs[lane + kLanes]) + (probs[lane + 2 * kLanes] + probs[lane + 3 * kLanes]);
    }
    double sum = 0;
    for (const float lane : lanes) sum += double{lane};
    total += sum;
    ends[first / kBlock] = total;
  }
}

#ifdef LLAMATAP_HAS_AVX2_COPY
__attribute__((target("avx2"))) LogitRange range_avx2(const float* logits, int32_t n) {
  return range_of(logits, n);
}
__attribute__((target("avx2"))) void sum_blocks_avx2(const float* logits, int32_t n, float temperature,
                                                     float largest, double* ends) {
  sum_blocks(logits, n, temperature, largest, ends);
}
bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") != 0;
  return has;
}
#endif

}  // namespace

LogitRange logit_range(const float* logits, int32_t n) {
#ifdef LLAMATAP_HAS_AVX2_COPY
  if (has_avx2()) return range_avx2(logits, n);
#endif
  return range_of(logits, n);
}

int32_t first_largest(const float* logits, int32_t n, float largest) {
  int32_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    int32_t found = 0;
    for (int32_t lane = 0; lane < kLanes; ++lane) found |= static_cast<int32_t>(logits[i + lane] == largest);
    if (found != 0) break;
  }
  return static_cast<int32_t>(std::find(logits + i, logits + n, largest) - logits);
}

int32_t draw_softmax_exactly(const float* logits, int32_t n, float largest, float temperature, double point) {
  std::vector<float> probs(static_cast<size_t>(n));
  const float top = largest / temperature;
  double total = 0;
  for (int32_t i = 0; i < n; ++i) {
    probs[i] = std::exp(logits[i] / temperature - top);
    total += double{probs[i]};
  }
  const double target = total * point;
  double sum = 0;
  for (int32_t i = 0; i < n; ++i) {
    sum += double{probs[i]};
    if (sum >= target) return i;
  }
  return n - 1;
}

int32_t draw_softmax(const float* logits, int32_t n, float largest, float temperature, double point) {
  const float top = largest / temperature;
  std::vector<double> ends(static_cast<size_t>((n + kBlock - 1) / kBlock));
#ifdef LLAMATAP_HAS_AVX2_COPY
  if (has_avx2()) {
    sum_blocks_avx2(logits, n, temperature, top, ends.data());
  } else {
    sum_blocks(logits, n, temperature, top, ends.data());
  }
#else
  sum_blocks(logits, n, temperature, top, ends.data());
#endif
  const double target = ends.back() * point;
  const double margin = ends.back() * kMaxError;
  const auto block = std::lower_bound(ends.begin(), ends.end(), target) - ends.begin();
  if (block < static_cast<std::ptrdiff_t>(ends.size())) {
    const auto first = static_cast<int32_t>(block) * kBlock;
    const int32_t n_here = std::min(kBlock, n - first);
    float probs[kBlock];
    exponentials(logits + first, n_here, temperature, top, probs);
    double sum = block == 0 ? 0 : ends[block - 1];
    for (int32_t i = 0; i < n_here; ++i) {
      const double before = sum;
      sum += double{probs[i]};
      if (sum < target) continue;
      if (target - before > margin && sum - target > margin) return first + i;
      break;
    }
  }
  return draw_softmax_exactly(logits, n, largest, temperature, point);
}

}  // namespace llamatap
