#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <utility>
#include <vector>

#include "engine/error.hpp"

namespace llamatap {

/// The most likely token and its probability, 1 / sum of all exp(l - max) over the logits l.
inline std::pair<int32_t, float> most_likely(const float* logits, int32_t n_vocab) {
  const float* best = std::max_element(logits, logits + n_vocab);
  double sum = 0;
  for (int32_t i = 0; i < n_vocab; ++i) sum += double{std::exp(logits[i] - *best)};
  return {static_cast<int32_t>(best - logits), static_cast<float>(1 / sum)};
}

/// Writes softmax(logits / temperature), n_vocab values, to `probs`.
inline void softmax(const float* logits, int32_t n_vocab, float temperature, float* probs) {
  const float best = *std::max_element(logits, logits + n_vocab);
  double sum = 0;
  for (int32_t i = 0; i < n_vocab; ++i) {
    probs[i] = std::exp((logits[i] - best) / temperature);
    sum += double{probs[i]};
  }
  for (int32_t i = 0; i < n_vocab; ++i) probs[i] = static_cast<float>(double{probs[i]} / sum);
}

/// The token at which the cumulative probability passes `point`, in [0, 1). The sum of `probs` need not be 1.
/// Throws EngineFailed when all are 0.
inline int32_t draw(const float* probs, int32_t n_vocab, double point) {
  double total = 0;
  for (int32_t i = 0; i < n_vocab; ++i) total += double{probs[i]};
  double sum = 0;
  int32_t last = -1;
  for (int32_t i = 0; i < n_vocab; ++i) {
    if (!(probs[i] > 0)) continue;
    last = i;
    sum += double{probs[i]};
    if (sum > point * total) return i;
  }
  if (last < 0) throw EngineFailed("no token has a probability above 0");
  return last;
}

/// The ids of the `k` largest logits, in descending order; ties by ascending id.
inline std::vector<int32_t> largest(const float* logits, int32_t n_vocab, int32_t k) {
  std::vector<int32_t> ids(static_cast<size_t>(n_vocab));
  std::iota(ids.begin(), ids.end(), 0);
  std::partial_sort(ids.begin(), ids.begin() + k, ids.end(), [&](int32_t a, int32_t b) {
    return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
  });
  ids.resize(static_cast<size_t>(k));
  return ids;
}

}  // namespace llamatap
