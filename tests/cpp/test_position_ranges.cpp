#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "engine/context/position_ranges.hpp"

namespace llamatap {

using Positions = std::vector<int32_t>;

TEST_CASE("a range is half-open") {
  const PositionRange range{2, 4};
  CHECK_FALSE(range.contains(1));
  CHECK(range.contains(2));
  CHECK(range.contains(3));
  CHECK_FALSE(range.contains(4));
}

TEST_CASE("positions are removed in all layers and in windows") {
  HeldPositions held{{0, 1, 2, 3, 4}, {3, 4}};
  held.remove({2, 4});
  CHECK(held.all == Positions{0, 1, 4});
  CHECK(held.windows == Positions{4});
}

TEST_CASE("added positions come from the range alone and stay sorted") {
  HeldPositions held{{0, 5}, {5}};
  held.add({{1, 2, 3, 9}, {2, 3, 9}}, {1, 4});
  CHECK(held.all == Positions{0, 1, 2, 3, 5});
  CHECK(held.windows == Positions{2, 3, 5});
}

TEST_CASE("windows reach back while they hold what the next token sees") {
  // The next token is at position 6; a window of 3 sees 4 and 5 beside itself.
  CHECK(HeldPositions{{0, 1, 2, 3, 4, 5}, {0, 1, 2, 3, 4, 5}}.reach_back(3));
  CHECK(HeldPositions{{0, 1, 2, 3, 4, 5}, {3, 4, 5}}.reach_back(3));
  CHECK_FALSE(HeldPositions{{0, 1, 2, 3, 4, 5}, {5}}.reach_back(3));
  CHECK_FALSE(HeldPositions{{0, 1, 2, 3, 4, 5}, {4, 5}}.reach_back(3));
}

TEST_CASE("windows with a gap, or with positions of their own, do not reach back") {
  CHECK_FALSE(HeldPositions{{0, 1, 2, 3, 4, 5}, {2, 3, 5}}.reach_back(2));
  CHECK_FALSE(HeldPositions{{4, 5}, {3, 4, 5}}.reach_back(2));
}

TEST_CASE("an empty sequence reaches back") { CHECK(HeldPositions{}.reach_back(4)); }

}  // namespace llamatap
