#include "draft/ngram.hpp"

#include <algorithm>

#include "draft/text_entries.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

/// FNV-1a over the n tokens before `end`, and n.
uint64_t hash_of(const std::vector<int32_t>& tokens, size_t end, size_t n) {
  uint64_t hash = 14695981039346656037ULL ^ n;
  for (size_t i = end - n; i < end; ++i) {
    hash = (hash ^ static_cast<uint32_t>(tokens[i])) * 1099511628211ULL;
  }
  return hash;
}

}  // namespace

NGramDrafter::NGramDrafter(int32_t n_longest, int32_t n_shortest, int32_t n_max, int32_t n_min)
    : n_longest_(n_longest), n_shortest_(n_shortest), n_max_(n_max), n_min_(n_min) {
  if (n_shortest < 1 || n_longest < n_shortest) {
    throw InvalidInput("n-grams must have 1 <= n_shortest <= n_longest tokens, not " +
                       std::to_string(n_shortest) + ".." + std::to_string(n_longest));
  }
  if (n_max < 1) throw InvalidInput("n_max must be at least 1");
}

void NGramDrafter::process(const Batch& batch, const float*, const Poll&) {
  const auto held = hold();
  for (const auto& [seq, rows] : entries_of_texts(batch, sequences_)) {
    auto& sequence = sequences_[seq];
    const int32_t first = batch.positions()[rows.front()];
    sequence.progress.begin_batch(first, static_cast<int32_t>(rows.size()));
    sequence.truncate(static_cast<size_t>(first));
    for (const int32_t row : rows) sequence.tokens.push_back(batch.tokens()[row]);
  }
}

void NGramDrafter::Sequence::truncate(size_t n) {
  tokens.resize(n);
  if (indexed <= n) return;
  // The text differs from here on: rebuild the index.
  ends.clear();
  indexed = 0;
}

void NGramDrafter::index(Sequence& sequence) const {
  const auto& tokens = sequence.tokens;
  // An n-gram at the end of the text has no successor yet.
  for (size_t end = sequence.indexed + 1; end < tokens.size(); ++end) {
    for (auto n = static_cast<size_t>(n_shortest_); n <= static_cast<size_t>(n_longest_) && n <= end; ++n) {
      sequence.ends[hash_of(tokens, end, n)] = end;
    }
    sequence.indexed = end;
  }
}

std::vector<Draft> NGramDrafter::draft(const std::vector<DraftRequest>& requests, const Poll&) {
  const auto held = hold();
  std::vector<Draft> drafts(requests.size());
  check_requests(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    const auto known = sequences_.find(request.seq);
    if (known == sequences_.end() && request.position == 0) continue;
    check_position(request, known == sequences_.end() ? Progress() : known->second.progress);
    auto& sequence = known->second;
    auto& text = sequence.tokens;
    const auto limit = static_cast<size_t>(std::max(0, std::min(n_max_, request.n_max)));
    text.push_back(request.last_token);
    index(sequence);
    auto& tokens = drafts[i].tokens;
    for (auto n = static_cast<size_t>(n_longest_); n >= static_cast<size_t>(n_shortest_) && tokens.empty();
         --n) {
      if (n >= text.size()) continue;
      const auto found = sequence.ends.find(hash_of(text, text.size(), n));
      if (found == sequence.ends.end()) continue;
      const size_t end = found->second;
      const bool same = std::equal(text.end() - static_cast<std::ptrdiff_t>(n), text.end(),
                                   text.begin() + static_cast<std::ptrdiff_t>(end - n));
      if (!same) continue;
      // Past the end of the text, continue with the drafted tokens themselves.
      for (size_t k = end; tokens.size() < limit; ++k) {
        tokens.push_back(k < text.size() ? text[k] : tokens[k - text.size()]);
      }
    }
    text.pop_back();
    if (static_cast<int32_t>(tokens.size()) < n_min_) tokens.clear();
  }
  return drafts;
}

void NGramDrafter::accept(int32_t seq, int32_t n) {
  const auto held = hold();
  const auto found = sequences_.find(seq);
  if (found == sequences_.end()) Progress().accept(seq, n);
  auto& sequence = found->second;
  sequence.progress.accept(seq, n);
  sequence.truncate(static_cast<size_t>(sequence.progress.next));
}

void NGramDrafter::reset(int32_t seq) {
  const auto held = hold();
  sequences_.erase(seq);
}

}  // namespace llamatap
