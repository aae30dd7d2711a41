#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "draft/pending_pairs.hpp"

namespace llamatap {

namespace {

/// Entries at positions 0, 1, ... with the tokens 10, 11, ...
PendingPairs pairs_of(int32_t offset, int32_t n) {
  PendingPairs pairs(offset, 2);
  for (int32_t i = 0; i < n; ++i) pairs.take({i, 10 + i, {1, 1}, true});
  return pairs;
}

}  // namespace

TEST_CASE("EAGLE-3: a pair is at the position of its state") {
  const auto pairs = pairs_of(0, 3);
  CHECK(pairs.n_complete() == 2);
  CHECK(pairs.position(0) == 0);
  CHECK(pairs.next_position() == 2);
}

TEST_CASE("MTP: the first pair has a state of zeros, and pairs are a position later") {
  auto pairs = pairs_of(1, 3);
  REQUIRE(pairs.n_complete() == 3);
  CHECK(pairs.entries().front().state == std::vector<float>{0, 0});
  CHECK(pairs.position(0) == 0);
  CHECK(pairs.next_position() == 3);
}

TEST_CASE("pairs that were dropped cannot be processed again") {
  auto pairs = pairs_of(0, 3);
  CHECK(pairs.earliest() == 0);
  pairs.drop_complete();
  CHECK(pairs.n_complete() == 0);
  CHECK(pairs.decoded_end() == 2);
  CHECK(pairs.earliest() == 3);
}

TEST_CASE("rejected entries are replaced") {
  auto pairs = pairs_of(0, 4);
  pairs.truncate(2);
  CHECK(pairs.last().position == 1);
  pairs.take({1, 77, {2, 2}, true});
  CHECK(pairs.last().token == 77);
  CHECK(pairs.n_complete() == 1);
}

TEST_CASE("a pair that a draft has decoded is decoded again only with another token") {
  for (const int32_t token : {50, 51}) {
    auto pairs = pairs_of(0, 3);
    pairs.drop_complete();
    pairs.set_drafted(50);
    pairs.take({3, token, {1, 1}, true});
    CHECK(pairs.n_complete() == (token == 50 ? 0 : 1));
  }
}

}  // namespace llamatap
