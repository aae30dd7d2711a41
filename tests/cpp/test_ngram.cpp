#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "batches.hpp"
#include "draft/ngram.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

using Tokens = std::vector<int32_t>;

Tokens draft(NGramDrafter& drafter, int32_t last_token, int32_t position, int32_t n_max = 3) {
  return drafter.draft({DraftRequest{0, last_token, position, n_max}}, nullptr).front().tokens;
}

/// The draft after a text whose last token was not decoded yet.
Tokens draft_after(Tokens text, NGramDrafter& drafter, int32_t n_max = 3) {
  const int32_t last = text.back();
  text.pop_back();
  drafter.process(text_of(text), nullptr, nullptr);
  return draft(drafter, last, static_cast<int32_t>(text.size()), n_max);
}

}  // namespace

TEST_CASE("a draft is what followed the same n-gram before") {
  NGramDrafter drafter(3, 1, 4, 0);
  CHECK(draft_after({1, 2, 3, 4, 5, 1, 2}, drafter) == Tokens{3, 4, 5});
}

TEST_CASE("the longest n-gram wins over a later, shorter one") {
  NGramDrafter drafter(2, 1, 4, 0);
  CHECK(draft_after({1, 2, 3, 9, 2, 7, 1, 2}, drafter, 1) == Tokens{3});
}

TEST_CASE("of equal n-grams the latest with a successor wins") {
  NGramDrafter drafter(2, 1, 4, 0);
  CHECK(draft_after({1, 2, 3, 1, 2, 4, 1, 2}, drafter, 1) == Tokens{4});
}

TEST_CASE("beyond the end of the text a draft repeats itself") {
  NGramDrafter drafter(2, 1, 8, 0);
  CHECK(draft_after({7, 8, 7}, drafter, 5) == Tokens{8, 7, 8, 7, 8});
}

TEST_CASE("drafts obey the limits of the drafter and of the request") {
  NGramDrafter short_drafts(2, 1, 2, 0);
  CHECK(draft_after({1, 2, 3, 4, 5, 1}, short_drafts, 9).size() == 2);
  NGramDrafter picky(2, 1, 4, 3);
  CHECK(draft_after({1, 2, 3, 4, 5, 1}, picky, 2).empty());
  NGramDrafter pairs(3, 2, 4, 0);
  CHECK(draft_after({1, 2, 3, 1}, pairs).empty());
}

TEST_CASE("rejected tokens leave the text and the index") {
  NGramDrafter drafter(1, 1, 1, 0);
  drafter.process(text_of({1, 2, 3}), nullptr, nullptr);
  // 4 and 5 were drafted after 1, and are rejected below.
  drafter.process(text_of({1, 4, 5}, 3), nullptr, nullptr);
  CHECK(draft(drafter, 4, 6, 1) == Tokens{5});
  drafter.accept(0, 0);
  CHECK(draft(drafter, 4, 4, 1).empty());
  CHECK(draft(drafter, 1, 4, 1) == Tokens{1});
  CHECK(draft(drafter, 2, 4, 1) == Tokens{3});
}

TEST_CASE("a sequence must be followed without a gap") {
  NGramDrafter drafter(2, 1, 4, 0);
  drafter.process(text_of({1, 2}), nullptr, nullptr);
  CHECK_THROWS_AS(drafter.process(text_of({3}, 3), nullptr, nullptr), InvalidInput);
  CHECK_THROWS_AS(drafter.process(batch_of({{2}, {4}}), nullptr, nullptr), InvalidInput);
  CHECK_THROWS_AS(draft(drafter, 1, 3), InvalidInput);
  CHECK_THROWS_AS(drafter.accept(0, 2), InvalidInput);
  drafter.reset(0);
  CHECK_NOTHROW(drafter.process(text_of({3}), nullptr, nullptr));
}

}  // namespace llamatap
