#include "draft/drafter.hpp"

#include <algorithm>
#include <random>
#include <string>

#include "draft/distribution.hpp"
#include "engine/error.hpp"

namespace llamatap {

std::unique_lock<std::mutex> Drafter::lock() {
  std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
  if (!held) throw Busy("another thread is using this drafter");
  return held;
}

std::map<int32_t, std::vector<int32_t>> entries_by_sequence(const Batch& batch) {
  if (!batch.has_tokens() || batch.has_embeddings()) {
    throw InvalidInput("the drafter needs token ids; this batch holds embeddings");
  }
  std::map<int32_t, std::vector<int32_t>> entries;
  for (int32_t row = 0; row < batch.size(); ++row) {
    for (const int32_t seq : batch.sequences()[row]) entries[seq].push_back(row);
  }
  for (auto& [seq, rows] : entries) {
    std::stable_sort(rows.begin(), rows.end(),
                     [&](int32_t a, int32_t b) { return batch.positions()[a] < batch.positions()[b]; });
  }
  return entries;
}

void check_contiguous(const Batch& batch, const std::vector<int32_t>& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    const int32_t expected = batch.positions()[rows[i - 1]] + 1;
    if (batch.positions()[rows[i]] == expected) continue;
    throw InvalidInput("position " + std::to_string(expected) + " is missing or comes twice in the batch");
  }
}

Choice choose(const float* logits, int32_t n_vocab, int32_t n_target, const DraftSettings& settings,
              const DraftRequest& request, size_t length) {
  if (settings.temperature <= 0) {
    const auto [token, prob] = most_likely(logits, n_vocab);
    return {token, prob, prob, {}};
  }
  Choice choice;
  choice.distribution.resize(static_cast<size_t>(n_target));
  softmax(logits, n_vocab, settings.temperature, choice.distribution.data());
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

void throw_wrong_position(const DraftRequest& request, int32_t expected) {
  throw InvalidInput("sequence " + std::to_string(request.seq) + ": the last token must be at position " +
                     std::to_string(expected) + ", after what was processed, not " +
                     std::to_string(request.position));
}

void throw_wrong_accept(int32_t seq, int32_t n, size_t n_entries) {
  throw InvalidInput("sequence " + std::to_string(seq) + " had " + std::to_string(n_entries) +
                     " entries in the last batch; the first and " + std::to_string(n) + " more cannot stand");
}

}  // namespace llamatap
