#include "draft/logprobs.hpp"

#include <algorithm>
#include <cmath>

#include "draft/distribution.hpp"
#include "engine/error.hpp"

namespace llamatap {

void add_logprobs(const float* logits, int32_t n_vocab, int32_t token, int32_t n_top, Logprobs& result) {
  if (n_top < 0) throw InvalidInput("n_top must be 0 or more, not " + std::to_string(n_top));
  if (token < 0 || token >= n_vocab) {
    throw InvalidInput("token ids must be in 0.." + std::to_string(n_vocab - 1) + ", not " +
                       std::to_string(token));
  }
  // -infinity is allowed (a token ruled out). NaN is found in the sum: max_element may skip it.
  const float best = *std::max_element(logits, logits + n_vocab);
  double sum = 0;
  for (int32_t i = 0; i < n_vocab; ++i) sum += double{std::exp(logits[i] - best)};
  if (!std::isfinite(best) || !std::isfinite(sum)) {
    throw NotFinite("the logits hold NaN or infinity, so there are no log-probabilities");
  }
  const double log_sum = double{best} + std::log(sum);
  result.n_top = std::min(n_top, n_vocab);
  result.chosen.push_back(double{logits[token]} - log_sum);
  if (result.n_top == 0) return;
  for (const int32_t id : largest(logits, n_vocab, result.n_top)) {
    result.top.push_back(id);
    result.top_logprobs.push_back(double{logits[id]} - log_sum);
  }
}

Logprobs logprobs(const Context& context, int32_t first_row, const std::vector<int32_t>& tokens,
                  int32_t n_top) {
  if (first_row < 0) throw InvalidInput("first_row must be 0 or more, not " + std::to_string(first_row));
  const ContextLock lock = context.hold();
  Logprobs result;
  int32_t row = first_row;
  for (const int32_t token : tokens) {
    add_logprobs(context.output_logits(row++), context.model()->vocab().size(), token, n_top, result);
  }
  return result;
}

}  // namespace llamatap
