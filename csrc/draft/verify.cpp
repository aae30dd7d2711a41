#include "draft/verify.hpp"

#include <algorithm>
#include <cmath>

#include "draft/distribution.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

// Tolerance of the sum of float32 probabilities.
constexpr double kMaxRoundingError = 1e-3;

bool ends(const Context& context, const Stops& stops, int32_t token) {
  if (stops.end_of_generation && context.model()->vocab().is_end_of_generation(token)) return true;
  return std::find(stops.tokens.begin(), stops.tokens.end(), token) != stops.tokens.end();
}

/// Throws InvalidInput unless `probs` is a distribution that the token can have been drawn from.
void check_distribution(const float* probs, int32_t n_vocab, int32_t token) {
  double sum = 0;
  bool good = true;
  for (int32_t v = 0; v < n_vocab; ++v) {
    good = good && probs[v] >= 0;
    sum += double{probs[v]};
  }
  if (!good || !(std::abs(sum - 1) <= kMaxRoundingError)) {
    throw InvalidInput("the distribution that the drafted token " + std::to_string(token) +
                       " was drawn from must hold probabilities of 0 or more that sum to 1, not to " +
                       std::to_string(sum));
  }
  if (token < 0 || token >= n_vocab || !(probs[token] > 0)) {
    throw InvalidInput("the drafted token " + std::to_string(token) +
                       " has probability 0 in the distribution that it was drawn from");
  }
}

}  // namespace

Verified verify(const Context& context, Sampler& sampler, int32_t first_row,
                const std::vector<int32_t>& draft, const Stops& stops) {
  const ContextLock lock = context.hold();
  const auto held = sampler.hold();
  const int32_t n_vocab = context.model()->vocab().size();
  Verified result;
  for (size_t i = 0; i <= draft.size(); ++i) {
    const int32_t row = first_row + static_cast<int32_t>(i);
    const int32_t token = sampler.sample(context.output_logits(row), n_vocab);
    result.tokens.push_back(token);
    const bool equal = i < draft.size() && token == draft[i];
    if (equal) ++result.n_accepted;
    if (!equal || ends(context, stops, token)) break;
  }
  return result;
}

Verified verify_by_rejection(const Context& context, Sampler& sampler, int32_t first_row,
                             const std::vector<int32_t>& draft, const float* distributions,
                             const Stops& stops) {
  const ContextLock lock = context.hold();
  const auto held = sampler.hold();
  const int32_t n_vocab = context.model()->vocab().size();
  Verified result;
  std::vector<float> p(static_cast<size_t>(n_vocab));
  std::vector<float> rest(static_cast<size_t>(n_vocab));
  for (size_t i = 0; i <= draft.size(); ++i) {
    const int32_t row = first_row + static_cast<int32_t>(i);
    sampler.distribution(context.output_logits(row), n_vocab, p.data());
    bool accepted = false;
    int32_t token = 0;
    if (i < draft.size()) {
      const float* q = distributions + i * static_cast<size_t>(n_vocab);
      token = draft[i];
      check_distribution(q, n_vocab, token);
      accepted = sampler.uniform() * double{q[token]} < double{p[token]};
      if (!accepted) {
        for (int32_t v = 0; v < n_vocab; ++v) rest[v] = std::max(0.0F, p[v] - q[v]);
        // All are 0 when p equals q up to rounding: then draw from p.
        if (std::any_of(rest.begin(), rest.end(), [](float one) { return one > 0; })) p.swap(rest);
      }
    }
    if (!accepted) token = draw(p.data(), n_vocab, sampler.uniform());
    sampler.accept(token);
    result.tokens.push_back(token);
    if (accepted) ++result.n_accepted;
    if (!accepted || ends(context, stops, token)) break;
  }
  return result;
}

}  // namespace llamatap
