#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "draft/suffix_automaton.hpp"

namespace llamatap {

/// Texts of many requests, in a fixed number of bytes, with the places of those that still grow. It consists
/// of four automata: texts are added to the newest; when that is full, the oldest is forgotten and used anew.
class SuffixCache {
 public:
  /// A growing text: its place in each automaton.
  struct Text {
    uint64_t generation = 0;
    std::array<SuffixAutomaton::Place, 4> places;
  };

  /// A drafted token, and how often it followed its context in relation to all that followed it.
  struct Guess {
    int32_t token;
    float prob;
  };

  explicit SuffixCache(size_t max_bytes);

  /// Adds a token to a text.
  void append(Text& text, int32_t token);

  /// The text that has these tokens, which are in the cache already, as a part of it.
  Text resume(const std::vector<int32_t>& tokens) const;

  /// Guesses the tokens after `text` and `last_token`: each is the most frequent one after the longest
  /// matching context, which must be at least half as long as that of the first. At most `n_max`, and at most
  /// `max_spec_factor` times the length of the first match; none from where their product of probabilities
  /// is below `p_min`.
  std::vector<Guess> guess(const Text& text, int32_t last_token, size_t n_max, double max_spec_factor,
                           double p_min) const;

  size_t n_bytes() const;

 private:
  void update(Text& text) const;
  void follow(Text& text, int32_t token) const;
  const SuffixAutomaton::Place* longest_match(Text& text, SuffixAutomaton::Continuation& next) const;
  size_t newest() const { return generation_ % parts_.size(); }

  size_t part_bytes_;
  /// Number of the newest automaton; automaton n is at n % 4.
  uint64_t generation_ = 0;
  std::array<std::unique_ptr<SuffixAutomaton>, 4> parts_;
};

}  // namespace llamatap
