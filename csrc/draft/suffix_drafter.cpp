#include "draft/suffix_drafter.hpp"

#include <algorithm>
#include <cmath>

#include "draft/text_entries.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

/// An automaton counts its states with 32 bits.
constexpr size_t kMaxBytes = size_t{1} << 36;
constexpr size_t kMinBytes = size_t{1} << 16;

SuffixSettings checked(const SuffixSettings& settings) {
  if (settings.max_bytes < kMinBytes || settings.max_bytes > kMaxBytes) {
    throw InvalidInput("max_bytes must be in " + std::to_string(kMinBytes) + ".." +
                       std::to_string(kMaxBytes) + ", not " + std::to_string(settings.max_bytes));
  }
  if (settings.n_max < 1) throw InvalidInput("n_max must be at least 1");
  if (!(settings.p_min >= 0 && settings.p_min <= 1)) throw InvalidInput("p_min must be in 0..1");
  if (!(settings.max_spec_factor > 0 && std::isfinite(settings.max_spec_factor))) {
    throw InvalidInput("max_spec_factor must be above 0");
  }
  return settings;
}

}  // namespace

SuffixDrafter::SuffixDrafter(const SuffixSettings& settings)
    : settings_(checked(settings)), cache_(settings.max_bytes) {}

void SuffixDrafter::process(const Batch& batch, const float*, const Poll&) {
  const auto held = hold();
  for (const auto& [seq, rows] : entries_of_texts(batch, sequences_)) {
    auto& sequence = sequences_[seq];
    const int32_t first = batch.positions()[rows.front()];
    sequence.progress.begin_batch(first, static_cast<int32_t>(rows.size()));
    truncate(sequence, static_cast<size_t>(first));
    cache(sequence, sequence.tokens.size());
    for (const int32_t row : rows) sequence.tokens.push_back(batch.tokens()[row]);
    // The first batch is a prompt; in others the tokens after the first may be a draft.
    sequence.n_certain = first == 0 ? sequence.tokens.size() : sequence.n_cached + 1;
  }
}

/// Adds the first n tokens of a sequence to the cache, those that are not there yet.
void SuffixDrafter::cache(Sequence& sequence, size_t n) {
  for (; sequence.n_cached < n; ++sequence.n_cached) {
    cache_.append(sequence.text, sequence.tokens[sequence.n_cached]);
  }
}

void SuffixDrafter::truncate(Sequence& sequence, size_t n) const {
  sequence.tokens.resize(n);
  sequence.n_certain = n;
  if (sequence.n_cached <= n) return;
  // What was taken back stays in the cache, as a text of its own.
  sequence.text = cache_.resume(sequence.tokens);
  sequence.n_cached = n;
}

std::vector<Draft> SuffixDrafter::draft(const std::vector<DraftRequest>& requests, const Poll&) {
  const auto held = hold();
  std::vector<Draft> drafts(requests.size());
  check_requests(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    const auto known = sequences_.find(request.seq);
    if (known == sequences_.end() && request.position == 0) continue;
    check_position(request, known == sequences_.end() ? Progress() : known->second.progress);
    auto& sequence = known->second;
    sequence.n_certain = sequence.tokens.size();
    cache(sequence, sequence.n_certain);
    const auto limit = static_cast<size_t>(std::max(0, std::min(settings_.n_max, request.n_max)));
    const auto guesses =
        cache_.guess(sequence.text, request.last_token, limit, settings_.max_spec_factor, settings_.p_min);
    if (static_cast<int32_t>(guesses.size()) < settings_.n_min) continue;
    for (const auto& [token, prob] : guesses) {
      drafts[i].tokens.push_back(token);
      drafts[i].probs.push_back(prob);
    }
  }
  return drafts;
}

void SuffixDrafter::accept(int32_t seq, int32_t n) {
  const auto held = hold();
  const auto found = sequences_.find(seq);
  if (found == sequences_.end()) Progress().accept(seq, n);
  auto& sequence = found->second;
  sequence.progress.accept(seq, n);
  truncate(sequence, static_cast<size_t>(sequence.progress.next));
  cache(sequence, sequence.n_certain);
}

void SuffixDrafter::reset(int32_t seq) {
  const auto held = hold();
  const auto found = sequences_.find(seq);
  if (found == sequences_.end()) return;
  cache(found->second, found->second.n_certain);
  sequences_.erase(found);
}

}  // namespace llamatap
