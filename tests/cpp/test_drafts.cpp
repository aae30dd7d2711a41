#include <doctest/doctest.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "batches.hpp"
#include "draft/choice.hpp"
#include "draft/distribution.hpp"
#include "draft/progress.hpp"
#include "draft/sequence_entries.hpp"
#include "engine/error.hpp"

namespace llamatap {

TEST_CASE("the most likely token comes with its probability") {
  const std::vector<float> logits{0, std::log(6.0F), 0, 0};
  const auto [token, prob] = most_likely(logits.data(), 4);
  CHECK(token == 1);
  CHECK(prob == doctest::Approx(6.0 / 9));
}

TEST_CASE("a draw picks a token by cumulative probability") {
  const std::vector<float> probs{0.0F, 0.25F, 0.0F, 0.75F};
  CHECK(draw(probs.data(), 4, 0.0) == 1);
  CHECK(draw(probs.data(), 4, 0.2499) == 1);
  CHECK(draw(probs.data(), 4, 0.25) == 3);
  CHECK(draw(probs.data(), 4, 0.9999) == 3);
  const std::vector<float> none(4, 0.0F);
  CHECK_THROWS_AS(draw(none.data(), 4, 0.5), EngineFailed);
}

TEST_CASE("the probabilities of a draw need not sum to 1") {
  const std::vector<float> left{0.1F, 0.1F};
  CHECK(draw(left.data(), 2, 0.49) == 0);
  CHECK(draw(left.data(), 2, 0.51) == 1);
}

TEST_CASE("equal logits are ordered by ascending id") {
  const std::vector<float> logits{1, 3, 3, 2, 3};
  CHECK(largest(logits.data(), 5, 4) == std::vector<int32_t>{1, 2, 4, 3});
}

TEST_CASE("a choice is the most likely token, or none for NaN") {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> logits{1, 2, 0};
  const std::vector<float> broken{nan, nan, nan};
  const DraftRequest request{0, 1, 4, 8};
  CHECK(choose(logits.data(), 3, 3, {}, request, 0).token == 1);
  CHECK(choose(broken.data(), 3, 3, {}, request, 0).token == -1);
  DraftSettings drawn;
  drawn.temperature = 1;
  CHECK(choose(broken.data(), 3, 3, drawn, request, 0).token == -1);
}

TEST_CASE("draws depend on the position alone, and are over the target's vocabulary") {
  const std::vector<float> logits(16, 0.0F);
  DraftSettings settings;
  settings.temperature = 1;
  const auto first = choose(logits.data(), 16, 18, settings, {0, 1, 4, 8}, 2);
  const auto same = choose(logits.data(), 16, 18, settings, {3, 9, 6, 1}, 0);
  CHECK(first.token == same.token);
  REQUIRE(first.distribution.size() == 18);
  CHECK(first.distribution[0] == doctest::Approx(1.0 / 16));
  CHECK(first.distribution[17] == 0);
}

TEST_CASE("short drafts are dropped, unless they were sampled") {
  const Draft one{{7}, {0.5F}, {}};
  DraftSettings settings;
  settings.n_min = 2;
  std::vector<Draft> drafts{one};
  drop_short(drafts, settings);
  CHECK(drafts[0].tokens.empty());
  settings.temperature = 1;
  drafts = {one};
  drop_short(drafts, settings);
  CHECK(drafts[0].tokens.size() == 1);
}

TEST_CASE("progress checks where batches start and what is accepted") {
  Progress progress;
  progress.begin_batch(0, 4);
  CHECK_NOTHROW(progress.check_start(0, 4, 4));
  CHECK_NOTHROW(progress.check_start(0, 2, 1));
  CHECK_THROWS_AS(progress.check_start(0, 0, 1), InvalidInput);
  CHECK_THROWS_AS(progress.check_start(0, 5, 0), InvalidInput);
  progress.begin_batch(4, 3);
  CHECK_THROWS_AS(progress.accept(0, 3), InvalidInput);
  CHECK_THROWS_AS(progress.accept(0, -1), InvalidInput);
  progress.accept(0, 1);
  CHECK(progress.next == 6);
}

TEST_CASE("entries are grouped by sequence in the order of their positions") {
  const auto entries = entries_by_sequence(batch_of({{1, 0}, {0, 1}, {0, 0}}));
  CHECK(entries.at(0) == std::vector<int32_t>{2, 0});
  CHECK(entries.at(1) == std::vector<int32_t>{1});
  CHECK_THROWS_AS(entries_by_sequence(Batch(4)), InvalidInput);
  const Batch gap = batch_of({{0}, {2}});
  CHECK_THROWS_AS(check_contiguous(gap, {0, 1}), InvalidInput);
  CHECK_NOTHROW(check_contiguous(gap, {1}));
}

TEST_CASE("there is one request per sequence, after the processed positions") {
  CHECK_THROWS_AS(check_requests({{0, 1, 4, 8}, {0, 1, 4, 8}}), InvalidInput);
  CHECK_NOTHROW(check_requests({{0, 1, 4, 8}, {1, 1, 4, 8}}));
  Progress progress;
  CHECK_THROWS_AS(check_position({0, 1, 0, 8}, progress), InvalidInput);
  progress.begin_batch(0, 4);
  CHECK_NOTHROW(check_position({0, 1, 4, 8}, progress));
  CHECK_THROWS_AS(check_position({0, 1, 3, 8}, progress), InvalidInput);
}

}  // namespace llamatap
