#include "draft/verify.hpp"

#include <algorithm>

#include "draft/distribution.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

bool ends(const Context& context, const Stops& stops, int32_t token) {
  if (stops.end_of_generation && context.model()->vocab().is_end_of_generation(token)) return true;
  return std::find(stops.tokens.begin(), stops.tokens.end(), token) != stops.tokens.end();
}

}  // namespace

Verified verify(const Context& context, Sampler& sampler, int32_t first_row,
                const std::vector<int32_t>& draft, const Stops& stops) {
  const Use use = context.hold();
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
  const Use use = context.hold();
  const int32_t n_vocab = context.model()->vocab().size();
  Verified result;
  std::vector<float> p(static_cast<size_t>(n_vocab));
  for (size_t i = 0; i <= draft.size(); ++i) {
    const int32_t row = first_row + static_cast<int32_t>(i);
    sampler.distribution(context.output_logits(row), n_vocab, p.data());
    bool accepted = false;
    int32_t token = 0;
    if (i < draft.size()) {
      const float* q = distributions + i * static_cast<size_t>(n_vocab);
      token = draft[i];
      if (token < 0 || token >= n_vocab || !(q[token] > 0)) {
        throw InvalidInput("the drafted token " + std::to_string(token) +
                           " has no probability in the distribution that it was drawn from");
      }
      accepted = sampler.uniform() * double{q[token]} < double{p[token]};
      if (!accepted) {
        for (int32_t v = 0; v < n_vocab; ++v) p[v] = std::max(0.0F, p[v] - q[v]);
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
