#include "draft/drafter.hpp"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>

#include "draft/distribution.hpp"
#include "engine/error.hpp"

namespace llamatap {

std::unique_lock<std::mutex> Drafter::lock() {
  std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
  if (!held) throw Busy("another thread is using this drafter");
  return held;
}

void Progress::check_start(int32_t seq, int32_t first, int32_t earliest) const {
  if (first == next || (first >= earliest && first < next)) return;
  throw InvalidInput("sequence " + std::to_string(seq) + " goes on at position " + std::to_string(next) +
                     ", not " + std::to_string(first) +
                     "; a drafter must process every batch of a sequence, from position 0, or be reset");
}

void Progress::begin_batch(int32_t first, int32_t n) {
  batch_start = first;
  next = first + n;
}

void Progress::accept(int32_t seq, int32_t n) {
  const int32_t n_entries = std::max(0, next - batch_start);
  if (n < 0 || n >= n_entries) {
    throw InvalidInput("sequence " + std::to_string(seq) + " had " + std::to_string(n_entries) +
                       " entries in the last batch; the first and " + std::to_string(n) +
                       " more cannot stand");
  }
  next = batch_start + n + 1;
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

bool all_finite(const float* values, size_t n) {
  return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

void check_requests(const std::vector<DraftRequest>& requests) {
  std::set<int32_t> seen;
  for (const auto& request : requests) {
    if (seen.insert(request.seq).second) continue;
    throw InvalidInput("sequence " + std::to_string(request.seq) + " is asked for twice");
  }
}

void check_position(const DraftRequest& request, const Progress& progress) {
  if (request.position == progress.next && progress.next > 0) return;
  throw InvalidInput("sequence " + std::to_string(request.seq) + ": the last token must be at position " +
                     std::to_string(progress.next) + ", after what was processed, not " +
                     std::to_string(request.position));
}

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
