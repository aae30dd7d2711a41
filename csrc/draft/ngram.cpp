#include "draft/ngram.hpp"

#include <algorithm>
#include <set>

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
  const auto held = lock();
  const auto entries = entries_by_sequence(batch);
  for (const auto& [seq, rows] : entries) {
    check_contiguous(batch, rows);
    const int32_t begin = batch.positions()[rows.front()];
    const auto found = sequences_.find(seq);
    const size_t next = found == sequences_.end() ? 0 : found->second.tokens.size();
    if (begin < 0 || static_cast<size_t>(begin) > next) {
      throw InvalidInput("sequence " + std::to_string(seq) + " goes on at position " + std::to_string(next) +
                         ", not " + std::to_string(begin) +
                         "; a drafter must process every batch of a sequence, from position 0");
    }
  }
  for (const auto& [seq, rows] : entries) {
    auto& sequence = sequences_[seq];
    sequence.batch_start = static_cast<size_t>(batch.positions()[rows.front()]);
    if (sequence.batch_start < sequence.indexed) {
      // The text goes another way from here.
      sequence.ends.clear();
      sequence.indexed = 0;
    }
    sequence.tokens.resize(sequence.batch_start);
    for (const int32_t row : rows) sequence.tokens.push_back(batch.tokens()[row]);
  }
}

void NGramDrafter::index(Sequence& sequence) const {
  const auto& tokens = sequence.tokens;
  if (sequence.indexed > tokens.size()) {
    sequence.ends.clear();
    sequence.indexed = 0;
  }
  // An n-gram that ends the text has no successor yet.
  for (size_t end = sequence.indexed + 1; end < tokens.size(); ++end) {
    for (auto n = static_cast<size_t>(n_shortest_); n <= static_cast<size_t>(n_longest_) && n <= end; ++n) {
      sequence.ends[hash_of(tokens, end, n)] = end;
    }
    sequence.indexed = end;
  }
}

std::vector<Draft> NGramDrafter::draft(const std::vector<DraftRequest>& requests, const Poll&) {
  const auto held = lock();
  std::vector<Draft> drafts(requests.size());
  std::set<int32_t> seen;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    if (!seen.insert(request.seq).second) {
      throw InvalidInput("sequence " + std::to_string(request.seq) + " is asked for twice");
    }
    auto& sequence = sequences_[request.seq];
    auto& text = sequence.tokens;
    if (request.position != static_cast<int32_t>(text.size())) {
      throw_wrong_position(request, static_cast<int32_t>(text.size()));
    }
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
      // Beyond the text's end, what is drafted goes on repeating itself.
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
  const auto held = lock();
  auto& sequence = sequences_[seq];
  const size_t last = sequence.tokens.size() - sequence.batch_start;
  if (n < 0 || static_cast<size_t>(n) >= last) throw_wrong_accept(seq, n, last);
  sequence.tokens.resize(sequence.batch_start + static_cast<size_t>(n) + 1);
}

void NGramDrafter::reset(int32_t seq) {
  const auto held = lock();
  sequences_.erase(seq);
}

}  // namespace llamatap
