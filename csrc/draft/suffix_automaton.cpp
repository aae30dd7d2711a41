#include "draft/suffix_automaton.hpp"

#include <algorithm>

namespace llamatap {

namespace {

constexpr uint32_t kRoot = 0;
constexpr uint32_t kNone = 0;

/// Known contexts of a token in which it is counted, longest first. Only a text that repeats itself many
/// times has more.
constexpr int32_t kMaxCounted = 64;

/// Edges in relation to states: natural text has 1.3 to 1.6.
constexpr double kEdgesPerState = 1.5;

}  // namespace

SuffixAutomaton::SuffixAutomaton(size_t max_bytes) {
  const double bytes = sizeof(State) + kEdgesPerState * (sizeof(Edge) + sizeof(uint32_t));
  max_states_ = std::max<size_t>(4, static_cast<size_t>(static_cast<double>(max_bytes) / bytes));
  max_edges_ = static_cast<size_t>(static_cast<double>(max_states_) * kEdgesPerState);
  states_.reserve(max_states_);
  edges_.reserve(max_edges_);
  buckets_.resize(max_edges_);
  clear();
}

void SuffixAutomaton::clear() {
  states_.clear();
  edges_.clear();
  std::fill(buckets_.begin(), buckets_.end(), kNone);
  add_state(0, kRoot);
  edges_.push_back({});
}

size_t SuffixAutomaton::n_bytes() const {
  return states_.capacity() * sizeof(State) + edges_.capacity() * sizeof(Edge) +
         buckets_.capacity() * sizeof(uint32_t);
}

size_t SuffixAutomaton::bucket(uint32_t state, int32_t token) const {
  const uint64_t key = uint64_t{state} << 32 | static_cast<uint32_t>(token);
  const uint64_t hash = (key ^ key >> 29) * 0x9E3779B97F4A7C15ULL >> 32;
  return static_cast<size_t>(hash * buckets_.size() >> 32);
}

uint32_t SuffixAutomaton::find(uint32_t state, int32_t token) const {
  uint32_t edge = buckets_[bucket(state, token)];
  while (edge != kNone && (edges_[edge].state != state || edges_[edge].token != token)) {
    edge = edges_[edge].next_hashed;
  }
  return edge;
}

uint32_t SuffixAutomaton::add_edge(uint32_t state, int32_t token, uint32_t target, uint32_t count) {
  const auto edge = static_cast<uint32_t>(edges_.size());
  uint32_t& hashed = buckets_[bucket(state, token)];
  edges_.push_back({state, token, target, states_[state].first, hashed, count});
  hashed = edge;
  states_[state].first = edge;
  return edge;
}

uint32_t SuffixAutomaton::add_state(uint32_t length, uint32_t link) {
  State state{};
  state.length = length;
  state.link = link;
  states_.push_back(state);
  return static_cast<uint32_t>(states_.size() - 1);
}

/// A state for the contexts of `state` of at most `length` tokens, which now occur elsewhere too.
uint32_t SuffixAutomaton::clone(uint32_t state, uint32_t length) {
  const uint32_t copy = add_state(length, states_[state].link);
  for (uint32_t edge = states_[state].first; edge != kNone; edge = edges_[edge].next) {
    const Edge one = edges_[edge];
    const uint32_t added = add_edge(copy, one.token, one.target, one.count);
    if (edge == states_[state].best) states_[copy].best = added;
  }
  states_[copy].n_continued = states_[state].n_continued;
  states_[state].link = copy;
  return copy;
}

/// Counts an occurrence of an edge, the latest of its state.
void SuffixAutomaton::count(uint32_t edge) {
  State& context = states_[edges_[edge].state];
  const uint32_t n = ++edges_[edge].count;
  ++context.n_continued;
  if (context.best == kNone || n >= edges_[context.best].count) context.best = edge;
}

bool SuffixAutomaton::append(Place& end, int32_t token) {
  const uint32_t from = end.state;
  // The longest context that the token has followed already; contexts above it get an edge.
  uint32_t known = from;
  uint32_t edge = find(known, token);
  size_t n_edges = 0;
  while (edge == kNone) {
    ++n_edges;
    if (known == kRoot) break;
    known = states_[known].link;
    edge = find(known, token);
  }
  const bool is_split = edge != kNone && states_[edges_[edge].target].length > states_[known].length + 1;
  const size_t n_states = size_t{n_edges > 0} + size_t{is_split};
  if (is_split) {
    ++n_edges;  // the copy itself may get one for the token
    for (uint32_t one = states_[edges_[edge].target].first; one != kNone; one = edges_[one].next) ++n_edges;
  }
  if (states_.size() + n_states > max_states_ || edges_.size() + n_edges > max_edges_) return false;

  uint32_t shorter = kRoot;
  if (edge != kNone) {
    shorter = edges_[edge].target;
    if (is_split) {
      const uint32_t whole = shorter;
      shorter = clone(whole, states_[known].length + 1);
      for (uint32_t state = known;; state = states_[state].link) {
        const uint32_t to_whole = find(state, token);
        if (to_whole == kNone || edges_[to_whole].target != whole) break;
        edges_[to_whole].target = shorter;
        if (state == kRoot) break;
      }
    }
  }
  if (known == from && edge != kNone) {
    end = {shorter, end.length + 1};
  } else {
    end = {add_state(states_[from].length + 1, shorter), end.length + 1};
    for (uint32_t state = from; edge == kNone || state != known; state = states_[state].link) {
      count(add_edge(state, token, end.state, 0));
      if (state == kRoot) break;
    }
  }
  for (int32_t n = 0; edge != kNone && known != kRoot && n < kMaxCounted; ++n) {
    count(find(known, token));
    known = states_[known].link;
  }
  return true;
}

void SuffixAutomaton::follow(Place& place, int32_t token) const {
  for (;;) {
    const uint32_t edge = find(place.state, token);
    if (edge != kNone) {
      place = {edges_[edge].target, place.length + 1};
      return;
    }
    if (place.state == kRoot) return;
    place.state = states_[place.state].link;
    place.length = states_[place.state].length;
  }
}

void SuffixAutomaton::make_end(Place& place) const {
  if (place.length == states_[place.state].length) return;
  place.state = states_[place.state].link;
  place.length = states_[place.state].length;
}

void SuffixAutomaton::back_off(Place& place) const {
  while (place.state != kRoot && states_[place.state].best == kNone) {
    place.state = states_[place.state].link;
    place.length = states_[place.state].length;
  }
}

SuffixAutomaton::Continuation SuffixAutomaton::continuation(const Place& place) const {
  const State& state = states_[place.state];
  const Edge& best = edges_[state.best];
  return {best.token, best.count, state.n_continued};
}

}  // namespace llamatap
