#include "draft/choice.hpp"

#include <algorithm>
#include <cmath>
#include <random>

#include "draft/distribution.hpp"

namespace llamatap {

Choice choose(const float* logits, int32_t n_vocab, int32_t n_target, const DraftSettings& settings,
              const DraftRequest& request, size_t length) {
  if (settings.temperature <= 0) {
    const auto [token, prob] = most_likely(logits, n_vocab);
    return {std::isnan(prob) ? -1 : token, prob, prob, {}};
  }
  Choice choice;
  choice.distribution.resize(static_cast<size_t>(n_target));
  softmax(logits, n_vocab, settings.temperature, choice.distribution.data());
  if (std::isnan(choice.distribution.front())) return {-1, 0, 0, {}};
  std::seed_seq keys{settings.seed, request.seed,
                     static_cast<uint32_t>(request.position) + static_cast<uint32_t>(length)};
  std::mt19937 random(keys);
  choice.token = draw(choice.distribution.data(), n_vocab, std::uniform_real_distribution<double>()(random));
  choice.prob = choice.distribution[choice.token];
  choice.best = *std::max_element(choice.distribution.begin(), choice.distribution.end());
  return choice;
}

void append(Draft& draft, const Choice& choice) {
  draft.tokens.push_back(choice.token);
  draft.probs.push_back(choice.prob);
  draft.distributions.insert(draft.distributions.end(), choice.distribution.begin(),
                             choice.distribution.end());
}

void drop_short(std::vector<Draft>& drafts, const DraftSettings& settings) {
  for (Draft& draft : drafts) {
    const bool is_short = static_cast<int32_t>(draft.tokens.size()) < settings.n_min;
    if (is_short && settings.temperature <= 0) draft = Draft();
  }
}

}  // namespace llamatap
