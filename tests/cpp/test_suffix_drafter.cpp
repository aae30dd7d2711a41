#include <doctest/doctest.h>

#include <cstdint>
#include <limits>
#include <vector>

#include "batches.hpp"
#include "draft/suffix_drafter.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

using Tokens = std::vector<int32_t>;

SuffixSettings any_length() {
  SuffixSettings settings;
  settings.max_spec_factor = 100;
  settings.p_min = 0;
  return settings;
}

Draft draft(SuffixDrafter& drafter, int32_t last_token, int32_t position, int32_t n_max = 3) {
  return drafter.draft({DraftRequest{0, last_token, position, n_max}}, nullptr).front();
}

/// The draft after a new text whose last token was not decoded yet.
Tokens draft_after(Tokens text, SuffixDrafter& drafter, int32_t n_max = 3) {
  const int32_t last = text.back();
  text.pop_back();
  drafter.reset(0);
  drafter.process(text_of(text), nullptr, nullptr);
  return draft(drafter, last, static_cast<int32_t>(text.size()), n_max).tokens;
}

}  // namespace

TEST_CASE("suffix: a text is known after its sequence has ended") {
  SuffixDrafter drafter(any_length());
  CHECK(draft_after({1, 2, 3, 4, 5}, drafter).empty());
  CHECK(draft_after({9, 3}, drafter) == Tokens{4});
  drafter.process(text_of({3, 4, 5}, 1), nullptr, nullptr);
  drafter.accept(0, 2);
  CHECK(draft_after({8, 3, 4}, drafter) == Tokens{5});
}

TEST_CASE("suffix: sequences see each other's texts while they grow") {
  SuffixDrafter drafter(any_length());
  Batch batch;
  for (int32_t i = 0; i < 6; ++i) batch.add(10 + i, i, {0}, false);
  for (int32_t i = 0; i < 3; ++i) batch.add(11 + i, i, {1}, false);
  drafter.process(batch, nullptr, nullptr);
  const auto drafts = drafter.draft({DraftRequest{0, 30, 6, 4}, DraftRequest{1, 14, 3, 4}}, nullptr);
  CHECK(drafts[0].tokens.empty());
  CHECK(drafts[1].tokens == Tokens{15});
  CHECK(drafts[1].probs == std::vector<float>{1});
}

TEST_CASE("suffix: rejected tokens are not cached") {
  SuffixDrafter drafter(any_length());
  drafter.process(text_of({1, 2, 3}), nullptr, nullptr);
  drafter.process(text_of({1, 4, 5}, 3), nullptr, nullptr);
  drafter.accept(0, 0);
  CHECK(draft(drafter, 4, 4).tokens.empty());
  // Nor when the sequence ends before the outcome is known.
  drafter.process(text_of({6, 7, 8}, 4), nullptr, nullptr);
  CHECK(draft_after({9, 7}, drafter).empty());
  CHECK(draft_after({9, 1}, drafter) == Tokens{6});
}

TEST_CASE("suffix: a text that is taken back goes on from there") {
  SuffixDrafter drafter(any_length());
  drafter.process(text_of({1, 2, 3, 4, 5, 6}), nullptr, nullptr);
  CHECK(draft(drafter, 3, 6).tokens == Tokens{4, 5, 6});
  drafter.process(text_of({2, 9}, 2), nullptr, nullptr);
  CHECK(draft(drafter, 2, 4).tokens == Tokens{9});
  CHECK(draft(drafter, 5, 4).tokens == Tokens{6});
}

TEST_CASE("suffix: drafts obey the limits of the drafter and of the request") {
  SuffixSettings settings = any_length();
  settings.n_max = 2;
  SuffixDrafter short_drafts(settings);
  CHECK(draft_after({1, 2, 3, 4, 5, 1}, short_drafts, 9).size() == 2);
  settings.n_max = 4;
  settings.n_min = 3;
  SuffixDrafter picky(settings);
  CHECK(draft_after({1, 2, 3, 4, 5, 1}, picky, 2).empty());
  SuffixDrafter usual({});
  CHECK(draft_after({1, 2, 3, 4, 5, 1}, usual, 2).size() == 1);
  CHECK(draft_after({1, 2, 3, 4, 5, 1}, usual, 0).empty());
}

TEST_CASE("suffix: settings out of range are refused") {
  const auto refused = [](auto member, auto value) {
    SuffixSettings settings;
    settings.*member = value;
    CHECK_THROWS_AS(SuffixDrafter{settings}, InvalidInput);
  };
  refused(&SuffixSettings::max_bytes, size_t{1000});
  refused(&SuffixSettings::max_bytes, std::numeric_limits<size_t>::max());
  refused(&SuffixSettings::n_max, 0);
  refused(&SuffixSettings::p_min, 1.5);
  refused(&SuffixSettings::max_spec_factor, 0.0);
  refused(&SuffixSettings::max_spec_factor, std::numeric_limits<double>::infinity());
}

TEST_CASE("suffix: a sequence must be followed without a gap") {
  SuffixDrafter drafter({});
  drafter.process(text_of({1, 2}), nullptr, nullptr);
  CHECK_THROWS_AS(drafter.process(text_of({3}, 3), nullptr, nullptr), InvalidInput);
  CHECK_THROWS_AS(draft(drafter, 1, 3), InvalidInput);
  CHECK_THROWS_AS(drafter.accept(0, 2), InvalidInput);
  CHECK_THROWS_AS(drafter.accept(5, 0), InvalidInput);
  drafter.reset(0);
  CHECK_NOTHROW(drafter.process(text_of({3}), nullptr, nullptr));
}

}  // namespace llamatap
