#include "draft/suffix_cache.hpp"

#include <algorithm>

namespace llamatap {

SuffixCache::SuffixCache(size_t max_bytes) : part_bytes_(max_bytes / parts_.size()) {
  parts_[0] = std::make_unique<SuffixAutomaton>(part_bytes_);
}

size_t SuffixCache::n_bytes() const {
  size_t n = 0;
  for (const auto& part : parts_) n += part ? part->n_bytes() : 0;
  return n;
}

/// Moves a text's places in automata that were used anew to their start.
void SuffixCache::update(Text& text) const {
  if (generation_ - text.generation > parts_.size()) text.generation = generation_ - parts_.size();
  while (text.generation < generation_) text.places[++text.generation % parts_.size()] = {};
}

void SuffixCache::follow(Text& text, int32_t token) const {
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i]) parts_[i]->follow(text.places[i], token);
  }
}

void SuffixCache::append(Text& text, int32_t token) {
  update(text);
  const size_t before = newest();
  for (size_t i = 0; i < parts_.size(); ++i) {
    if (parts_[i] && i != before) parts_[i]->follow(text.places[i], token);
  }
  if (parts_[before]->append(text.places[before], token)) return;
  parts_[before]->follow(text.places[before], token);
  ++generation_;
  auto& next = parts_[newest()];
  if (next) {
    next->clear();
  } else {
    next = std::make_unique<SuffixAutomaton>(part_bytes_);
  }
  update(text);
  next->append(text.places[newest()], token);
}

SuffixCache::Text SuffixCache::resume(const std::vector<int32_t>& tokens) const {
  Text text;
  text.generation = generation_;
  for (const int32_t token : tokens) follow(text, token);
  parts_[newest()]->make_end(text.places[newest()]);
  return text;
}

/// The longest place with a continuation, after all backed off; of equally long ones that with the most
/// frequent continuation, then the newest. Null without any.
const SuffixAutomaton::Place* SuffixCache::longest_match(Text& text,
                                                         SuffixAutomaton::Continuation& next) const {
  const SuffixAutomaton::Place* found = nullptr;
  for (uint64_t age = 0; age < parts_.size() && age <= generation_; ++age) {
    const size_t i = (generation_ - age) % parts_.size();
    auto& place = text.places[i];
    parts_[i]->back_off(place);
    if (place.length == 0 || (found != nullptr && place.length < found->length)) continue;
    const auto continuation = parts_[i]->continuation(place);
    if (found != nullptr && place.length == found->length && continuation.count <= next.count) continue;
    found = &place;
    next = continuation;
  }
  return found;
}

std::vector<SuffixCache::Guess> SuffixCache::guess(const Text& text, int32_t last_token, size_t n_max,
                                                   double max_spec_factor, double p_min) const {
  std::vector<Guess> guesses;
  Text reached = text;
  update(reached);
  uint32_t match = 0;
  double prob = 1;
  for (int32_t token = last_token; guesses.size() < n_max; token = guesses.back().token) {
    follow(reached, token);
    SuffixAutomaton::Continuation next{};
    const auto* place = longest_match(reached, next);
    if (place == nullptr || place->length < match - match / 2) break;
    if (guesses.empty()) {
      match = place->length;
      const double longest = max_spec_factor * match;
      if (longest < static_cast<double>(n_max)) n_max = static_cast<size_t>(longest);
      if (n_max == 0) break;
    }
    const double share = static_cast<double>(next.count) / next.total;
    prob *= share;
    if (prob < p_min) break;
    guesses.push_back({next.token, static_cast<float>(share)});
  }
  return guesses;
}

}  // namespace llamatap
