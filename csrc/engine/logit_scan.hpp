#pragma once

#include <cstdint>

namespace llamatap {

/// The largest logit and the largest absolute value of a finite one. `usable`: there is neither NaN nor
/// +infinity, and at least one is finite.
struct LogitRange {
  float largest;
  float largest_absolute;
  bool usable;
};

LogitRange logit_range(const float* logits, int32_t n);

/// The first token with the largest logit; `largest` is that.
int32_t first_largest(const float* logits, int32_t n, float largest);

/// Draws from softmax(logits / temperature): the token at which the sum of probabilities reaches `point`, in
/// [0, 1). The same token as the engine's samplers choose with that number, in a fraction of the time:
/// approximate exponentials decide, unless the point is within their error of the border between two tokens.
int32_t draw_softmax(const float* logits, int32_t n, float largest, float temperature, double point);

/// As draw_softmax(), by the engine's own arithmetic.
int32_t draw_softmax_exactly(const float* logits, int32_t n, float largest, float temperature, double point);

}  // namespace llamatap
