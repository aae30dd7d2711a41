#include <doctest/doctest.h>

#include <cstdint>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "draft/suffix_cache.hpp"

namespace llamatap {

namespace {

using Tokens = std::vector<int32_t>;

constexpr double kAnyLength = 1e9;

Tokens tokens_of(const std::vector<SuffixCache::Guess>& guesses) {
  Tokens tokens;
  for (const auto& guess : guesses) tokens.push_back(guess.token);
  return tokens;
}

Tokens guess(const SuffixCache& cache, const SuffixCache::Text& text, int32_t last_token, size_t n_max,
             double factor = kAnyLength, double p_min = 0) {
  return tokens_of(cache.guess(text, last_token, n_max, factor, p_min));
}

SuffixCache::Text add(SuffixCache& cache, const Tokens& tokens) {
  SuffixCache::Text text;
  for (const int32_t token : tokens) cache.append(text, token);
  return text;
}

/// A text, and how many of its tokens were known when it began.
struct Written {
  Tokens tokens;
  size_t n_shared = 0;
};

struct Found {
  size_t length = 0;
  int32_t token = -1;
  double share = 0;
};

/// The longest suffix of `context` that was continued in any text, and its most frequent continuation; of
/// equally frequent ones that of the latest occurrence. `order`: when each token was added.
Found best_by_search(const std::vector<Written>& texts, const std::vector<std::vector<size_t>>& order,
                     const Tokens& context) {
  Found result;
  size_t& longest = result.length;
  std::map<int32_t, std::pair<size_t, size_t>> found;  // by token: occurrences, the latest
  for (size_t t = 0; t < texts.size(); ++t) {
    const Tokens& tokens = texts[t].tokens;
    for (size_t end = std::max<size_t>(1, texts[t].n_shared); end < tokens.size(); ++end) {
      size_t n = 0;
      while (n < end && n < context.size() && tokens[end - 1 - n] == context[context.size() - 1 - n]) ++n;
      if (n == 0 || n < longest) continue;
      if (n > longest) found.clear();
      longest = n;
      auto& [count, latest] = found[tokens[end]];
      ++count;
      latest = std::max(latest, order[t][end]);
    }
  }
  size_t total = 0;
  for (const auto& [token, seen] : found) {
    total += seen.first;
    if (result.token < 0 || seen > found[result.token]) result.token = token;
  }
  if (total > 0) result.share = static_cast<double>(found[result.token].first) / static_cast<double>(total);
  return result;
}

}  // namespace

TEST_CASE("a guess continues the longest match in any text") {
  SuffixCache cache(1 << 20);
  add(cache, {1, 2, 3, 4, 5, 6});
  const auto text = add(cache, {9, 2, 3});
  CHECK(guess(cache, text, 4, 8) == Tokens{5, 6});
  CHECK(guess(cache, text, 4, 1) == Tokens{5});
  CHECK(guess(cache, text, 7, 8).empty());
}

TEST_CASE("the most frequent continuation is guessed; of equally frequent ones the latest") {
  SuffixCache cache(1 << 20);
  for (const int32_t next : {5, 6, 6, 5}) add(cache, {1, 2, next});
  const auto text = add(cache, {1});
  CHECK(guess(cache, text, 2, 1) == Tokens{5});
  add(cache, {1, 2, 7});
  CHECK(guess(cache, text, 2, 1) == Tokens{5});
  add(cache, {1, 2, 6});
  CHECK(guess(cache, text, 2, 1) == Tokens{6});
  const auto guesses = cache.guess(text, 2, 1, kAnyLength, 0);
  CHECK(guesses.front().prob == doctest::Approx(3.0 / 6));
  CHECK(guess(cache, text, 2, 1, kAnyLength, 0.5) == Tokens{6});
  CHECK(guess(cache, text, 2, 1, kAnyLength, 0.51).empty());
}

TEST_CASE("the length of a draft grows with its match") {
  SuffixCache cache(1 << 20);
  add(cache, {1, 2, 3, 4, 5, 6, 7, 8, 9});
  CHECK(guess(cache, add(cache, {0}), 2, 64, 1) == Tokens{3});
  CHECK(guess(cache, add(cache, {1}), 2, 64, 1) == Tokens{3, 4});
  CHECK(guess(cache, add(cache, {1, 2}), 3, 64, 1.5) == Tokens{4, 5, 6, 7});
  CHECK(guess(cache, add(cache, {0}), 2, 64, 0.9).empty());
}

TEST_CASE("a text that repeats itself continues beyond its end") {
  SuffixCache cache(1 << 20);
  const auto text = add(cache, {1, 2, 3, 1, 2, 3, 1, 2});
  CHECK(guess(cache, text, 3, 7) == Tokens{1, 2, 3, 1, 2, 3, 1});
  const auto same = add(cache, Tokens(5000, 4));
  CHECK(guess(cache, same, 4, 40) == Tokens(40, 4));
}

TEST_CASE("guesses are those of a search through all texts") {
  std::mt19937 random(1);
  const auto below = [&](size_t n) { return static_cast<size_t>(random() % n); };
  for (int32_t round = 0; round < 300; ++round) {
    SuffixCache cache(1 << 16);
    const size_t n_tokens = 1 + below(4);
    std::vector<Written> written;
    std::vector<std::vector<size_t>> order;
    std::vector<std::pair<SuffixCache::Text, size_t>> growing;  // and its number in `written`
    size_t now = 0;
    for (int32_t step = 0; step < 60; ++step) {
      if (growing.empty() || below(15) == 0) {
        growing.emplace_back(SuffixCache::Text(), written.size());
        written.emplace_back();
        order.emplace_back();
      }
      auto& [text, number] = growing[below(growing.size())];
      if (!written[number].tokens.empty() && below(20) == 0) {
        // It is taken back, and goes on as another text.
        const size_t left = below(written[number].tokens.size());
        Tokens kept(written[number].tokens.begin(),
                    written[number].tokens.begin() + static_cast<std::ptrdiff_t>(left));
        text = cache.resume(kept);
        number = written.size();
        order.emplace_back(left, 0);
        written.push_back({std::move(kept), left});
      }
      const auto token = static_cast<int32_t>(below(n_tokens));
      cache.append(text, token);
      written[number].tokens.push_back(token);
      order[number].push_back(++now);

      const auto last = static_cast<int32_t>(below(n_tokens));
      Tokens context = written[number].tokens;
      Tokens expected;
      std::vector<float> shares;
      size_t match = 0;
      for (int32_t next = last; expected.size() < 6; next = expected.back()) {
        context.push_back(next);
        const Found best = best_by_search(written, order, context);
        if (best.length == 0 || 2 * best.length < match) break;
        if (expected.empty()) match = best.length;
        expected.push_back(best.token);
        shares.push_back(static_cast<float>(best.share));
      }
      const auto guesses = cache.guess(text, last, 6, kAnyLength, 0);
      REQUIRE(tokens_of(guesses) == expected);
      for (size_t i = 0; i < guesses.size(); ++i) REQUIRE(guesses[i].prob == shares[i]);
    }
  }
}

TEST_CASE("a million tokens stay within the bytes, and the newest are known") {
  constexpr size_t kBytes = size_t{4} << 20;
  std::mt19937 random(2);
  for (int32_t kind = 0; kind < 4; ++kind) {
    CAPTURE(kind);
    SuffixCache cache(kBytes);
    SuffixCache::Text text;
    const auto next = [&](size_t i) {
      switch (kind) {
        case 0: return 7;                                              // one token
        case 1: return static_cast<int32_t>(random() % 49152);         // anything
        case 2: return static_cast<int32_t>(random() % 2);             // two tokens
        default: return static_cast<int32_t>(i % 3 == 2 ? i : i % 3);  // the same pair before each new token
      }
    };
    Tokens newest;
    for (size_t i = 0; i < 1000000; ++i) {
      if (i % 5000 == 0) text = {};
      const int32_t token = next(i);
      cache.append(text, token);
      if (i >= 999900) newest.push_back(token);
      if (i % 100000 == 0) CHECK(cache.n_bytes() <= kBytes);
    }
    CHECK(cache.n_bytes() <= kBytes);
    const auto again = add(cache, {newest.begin(), newest.begin() + 60});
    const Tokens expected(newest.begin() + 61, newest.begin() + 91);
    CHECK(guess(cache, again, newest[60], 30) == expected);
  }
}

TEST_CASE("the oldest texts leave first") {
  SuffixCache cache(1 << 16);
  const auto text_of_number = [](int32_t number) {
    Tokens tokens;
    for (int32_t i = 0; i < 50; ++i) tokens.push_back(number * 50 + i);
    return tokens;
  };
  constexpr int32_t kTexts = 200;
  for (int32_t number = 0; number < kTexts; ++number) add(cache, text_of_number(number));
  bool known_before = false;
  int32_t n_known = 0;
  for (int32_t number = 0; number < kTexts; ++number) {
    const bool known = !guess(cache, SuffixCache::Text(), number * 50 + 20, 1).empty();
    CHECK((known || !known_before));
    known_before = known;
    n_known += known ? 1 : 0;
  }
  CHECK(n_known >= 8);
  CHECK(n_known < kTexts);
}

TEST_CASE("a text that grows while others fill the cache keeps its place") {
  SuffixCache cache(1 << 16);
  auto text = add(cache, {1, 2, 3});
  for (int32_t i = 0; i < 100; ++i) add(cache, Tokens(100, 100 + i));
  for (const int32_t token : {5, 6, 7, 8, 5}) cache.append(text, token);
  CHECK(guess(cache, text, 6, 2) == Tokens{7, 8});
}

TEST_CASE("a text keeps its matches in older parts when a new one begins") {
  std::mt19937 random(4);
  Tokens known;
  for (int32_t i = 0; i < 200; ++i) known.push_back(static_cast<int32_t>(random() % 2));
  SuffixCache cache(1 << 18);
  add(cache, known);
  size_t n_bytes = 0;
  size_t n_began = 0;
  for (int32_t number = 0; number < 40 && n_began < 3; ++number) {
    // New to the cache as a whole, so that each token takes room.
    auto text = add(cache, {100 + number});
    for (size_t i = 0; i + 2 < known.size(); ++i) {
      cache.append(text, known[i]);
      n_began += cache.n_bytes() > n_bytes ? 1 : 0;
      n_bytes = cache.n_bytes();
      if (i > 30) REQUIRE(guess(cache, text, known[i + 1], 1) == Tokens{known[i + 2]});
    }
  }
  CHECK(n_began == 3);
}

TEST_CASE("of equally long and frequent matches that of the newest part counts") {
  SuffixCache cache(1 << 16);
  add(cache, {1, 2, 5});
  const size_t n_bytes = cache.n_bytes();
  for (int32_t i = 10; cache.n_bytes() == n_bytes; ++i) add(cache, Tokens(1, i));
  add(cache, {1, 2, 6});
  CHECK(guess(cache, add(cache, {1}), 2, 1) == Tokens{6});
  add(cache, {1, 2, 7});
  add(cache, {1, 2, 7});
  CHECK(guess(cache, add(cache, {1}), 2, 1) == Tokens{7});
}

TEST_CASE("a text is resumed where it is known as a whole, else anew") {
  SuffixCache cache(1 << 16);
  add(cache, {8, 1, 2, 3});
  auto text = cache.resume({8, 1, 2});
  cache.append(text, 6);
  CHECK(guess(cache, add(cache, {8, 1}), 2, 1) == Tokens{6});
  auto other = cache.resume({9, 1, 2, 3});
  cache.append(other, 5);
  CHECK(guess(cache, add(cache, {8, 1, 2}), 3, 1).empty());
}

TEST_CASE("an automaton takes no more room than it may, however full it is") {
  std::mt19937 random(5);
  for (size_t max_bytes = 500; max_bytes < 3000; ++max_bytes) {
    SuffixAutomaton automaton(max_bytes);
    const size_t n_bytes = automaton.n_bytes();
    REQUIRE(n_bytes <= max_bytes);
    std::vector<SuffixAutomaton::Place> ends(2);
    for (bool has_room = true; has_room;) {
      auto& end = ends[random() % ends.size()];
      if (random() % 20 == 0) end = {};
      has_room = automaton.append(end, static_cast<int32_t>(random() % 6));
    }
    REQUIRE(automaton.n_bytes() == n_bytes);
    automaton.clear();
    SuffixAutomaton::Place end;
    REQUIRE(automaton.append(end, 1));
  }
}

}  // namespace llamatap
