#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llamatap {

/// Suffix automaton of texts that grow in any order, with the frequency of each continuation, in a fixed
/// number of bytes. A state stands for contexts that have occurred at the same places. (Blumer et al., The
/// smallest automaton recognizing the subwords of a text, 1985.)
class SuffixAutomaton {
 public:
  /// The longest suffix of a text that has occurred: its state and its number of tokens.
  struct Place {
    uint32_t state = 0;
    uint32_t length = 0;
  };

  /// The most frequent token after a context; of equally frequent ones that of the latest occurrence.
  struct Continuation {
    int32_t token;
    uint32_t count;  // how often it followed
    uint32_t total;  // how often anything followed
  };

  /// Memory is allocated here; the system provides it as it is used.
  explicit SuffixAutomaton(size_t max_bytes);

  /// Adds a token after the end of a text, Place() for a new one, and moves the end. Does nothing and returns
  /// false when there is no room.
  bool append(Place& end, int32_t token);

  /// Moves a place by a token that is not added.
  void follow(Place& place, int32_t token) const;

  /// Shortens a place to one that a text can grow from.
  void make_end(Place& place) const;

  /// Shortens a place to the longest suffix that was continued; Place() if none was.
  void back_off(Place& place) const;

  /// The continuation of a place after back_off(); not of Place().
  Continuation continuation(const Place& place) const;

  /// Forgets all texts.
  void clear();

  size_t n_bytes() const;

 private:
  struct State {
    uint32_t length;       // of its longest context
    uint32_t link;         // state of the longest shorter context that has also occurred elsewhere
    uint32_t first = 0;    // list of its edges; 0: none
    uint32_t best = 0;     // edge of the most frequent continuation
    uint32_t n_continued;  // sum of the counts of its edges
  };
  struct Edge {
    uint32_t state;
    int32_t token;
    uint32_t target;
    uint32_t next;         // in the list of its state
    uint32_t next_hashed;  // in its bucket
    uint32_t count;
  };

  size_t bucket(uint32_t state, int32_t token) const;
  uint32_t find(uint32_t state, int32_t token) const;
  uint32_t add_edge(uint32_t state, int32_t token, uint32_t target, uint32_t count);
  uint32_t add_state(uint32_t length, uint32_t link);
  uint32_t clone(uint32_t state, uint32_t length);
  void count(uint32_t edge);

  size_t max_states_;
  size_t max_edges_;
  std::vector<State> states_;
  std::vector<Edge> edges_;  // the first is unused
  std::vector<uint32_t> buckets_;
};

}  // namespace llamatap
