#include <doctest/doctest.h>

#include <cstdint>
#include <vector>

#include "batches.hpp"
#include "engine/context/batch_plan.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

using Rows = std::vector<int32_t>;

BatchRules rules(uint32_t n_batch = 16, uint32_t n_ubatch = 4) {
  BatchRules rules;
  rules.n_vocab = 100;
  rules.position_limit = 1000;
  rules.n_seq_max = 3;
  rules.n_batch = n_batch;
  rules.n_ubatch = n_ubatch;
  return rules;
}

}  // namespace

TEST_CASE("a plain decode is one call, with the flags of the batch") {
  const auto pieces = plan_batch(batch_of({{0}, {1}, {2, 0, true}}), rules(), {});
  REQUIRE(pieces.size() == 1);
  CHECK(pieces[0].rows == Rows{0, 1, 2});
  CHECK(pieces[0].output_rows == Rows{2});
  CHECK_FALSE(pieces[0].may_stop);
}

TEST_CASE("entries are sorted by position, only when necessary") {
  CHECK(plan_batch(batch_of({{2}, {0}, {1}}), rules(), {})[0].rows == Rows{1, 2, 0});
  // Interleaved sequences are in order already.
  CHECK(plan_batch(batch_of({{5}, {0, 1}, {6}, {1, 1}}), rules(), {})[0].rows == Rows{0, 1, 2, 3});
}

TEST_CASE("a call has n_batch entries at most") {
  const auto pieces = plan_batch(batch_of({{0}, {1}, {2}, {3}, {4}}), rules(2), {});
  REQUIRE(pieces.size() == 3);
  CHECK(pieces[0].rows == Rows{0, 1});
  CHECK(pieces[2].rows == Rows{4});
}

TEST_CASE("a call has n_outputs_max outputs at most") {
  auto few = rules();
  few.n_outputs_max = 1;
  const auto pieces = plan_batch(batch_of({{0, 0, true}, {1}, {2, 0, true}}), few, {});
  REQUIRE(pieces.size() == 2);
  CHECK(pieces[0].rows == Rows{0, 1});
  CHECK(pieces[1].rows == Rows{2});
  CHECK(pieces[1].output_rows == Rows{2});
}

TEST_CASE("with sliding windows a call is one ubatch") {
  auto windows = rules();
  windows.n_swa = 8;
  for (const bool output : {false, true}) {
    const auto pieces = plan_batch(batch_of({{0}, {1}, {2}, {3}, {4, 0, output}}), windows, {});
    REQUIRE(pieces.size() == 2);
    CHECK(pieces[0].rows.size() == 4);
  }
}

TEST_CASE("entries before the first output of their sequences go first when they need the last block") {
  PlanWishes wishes;
  wishes.needs_last_block = {true, true, true, true};
  wishes.may_stop = true;
  // Sequence 0 has an output at its second entry, sequence 1 has none.
  const auto pieces = plan_batch(batch_of({{0}, {1, 0, true}, {0, 1}, {2}}), rules(), wishes);
  REQUIRE(pieces.size() == 2);
  CHECK(pieces[0].rows == Rows{0, 2});
  CHECK(pieces[0].output_rows == Rows{0, 2});
  CHECK(pieces[0].may_stop);
  CHECK(pieces[1].rows == Rows{1, 3});
  CHECK(pieces[1].output_rows == Rows{1, 3});
  CHECK_FALSE(pieces[1].may_stop);
}

TEST_CASE("pieces that need the last block are one ubatch long") {
  PlanWishes wishes;
  wishes.needs_last_block.assign(6, true);
  const auto pieces = plan_batch(batch_of({{0}, {1}, {2}, {3}, {4}, {5}}), rules(16, 4), wishes);
  REQUIRE(pieces.size() == 2);
  CHECK(pieces[0].rows.size() == 4);
}

TEST_CASE("a batch is not split when no early entry needs the last block") {
  PlanWishes wishes;
  wishes.needs_last_block = {false, true};
  const auto pieces = plan_batch(batch_of({{0}, {1, 0, true}}), rules(), wishes);
  REQUIRE(pieces.size() == 1);
  CHECK(pieces[0].output_rows == Rows{1});
}

TEST_CASE("a scratch decode without outputs may stop") {
  PlanWishes wishes;
  wishes.scratch = wishes.may_stop = true;
  CHECK(plan_batch(batch_of({{0}, {1}}), rules(), wishes)[0].may_stop);
  CHECK_FALSE(plan_batch(batch_of({{0}, {1, 0, true}}), rules(), wishes).back().may_stop);
}

TEST_CASE("with draft blocks that compute all rows, an output flags all rows") {
  auto draft = rules();
  draft.computes_all_rows = true;
  CHECK(plan_batch(batch_of({{0}, {1, 0, true}}), draft, {})[0].output_rows == Rows{0, 1});
  CHECK(plan_batch(batch_of({{0}, {1}}), draft, {})[0].output_rows == Rows{});
}

TEST_CASE("without a memory the batch is one call, all of it flagged") {
  auto encoder = rules();
  encoder.has_memory = false;
  encoder.at_once = true;
  PlanWishes wishes;
  wishes.scratch = true;
  const auto pieces = plan_batch(batch_of({{1}, {0}}), encoder, wishes);
  REQUIRE(pieces.size() == 1);
  CHECK(pieces[0].rows == Rows{0, 1});
  CHECK(pieces[0].output_rows == Rows{0, 1});
  CHECK(pieces[0].may_stop);
}

TEST_CASE("a batch that must be computed at once is not cut") {
  auto at_once = rules();
  at_once.at_once = true;
  at_once.n_outputs_max = 1;
  PlanWishes wishes;
  wishes.needs_last_block = {true, false};
  CHECK(plan_batch(batch_of({{0}, {1, 0, false}}), at_once, wishes).size() == 1);
  wishes.needs_last_block = {true, true};
  CHECK_THROWS_AS(plan_batch(batch_of({{0}, {1}}), at_once, wishes), InvalidInput);
}

}  // namespace llamatap
