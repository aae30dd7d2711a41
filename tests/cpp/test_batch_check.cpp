#include <doctest/doctest.h>

#include <cstdint>

#include "batches.hpp"
#include "engine/context/batch_check.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

BatchRules rules() {
  BatchRules rules;
  rules.n_vocab = 100;
  rules.position_limit = 50;
  rules.n_seq_max = 3;
  rules.n_batch = 16;
  rules.n_ubatch = 4;
  return rules;
}

void check(const Batch& batch, const BatchRules& rules, int32_t last = -1) {
  check_batch(batch, rules, [last](int32_t) { return last; });
}

Batch one_entry(int32_t token, int32_t position, const std::vector<int32_t>& sequences) {
  Batch batch;
  batch.add(token, position, sequences, false);
  return batch;
}

}  // namespace

TEST_CASE("a batch that continues the memory is accepted") {
  CHECK_NOTHROW(check(batch_of({{0}, {1}, {2}}), rules()));
  CHECK_NOTHROW(check(batch_of({{7}, {8}}), rules(), 6));
  CHECK_NOTHROW(check(batch_of({{2}, {0}, {1}, {0, 1}}), rules()));
}

TEST_CASE("a sequence that is not in memory may begin anywhere") {
  CHECK_NOTHROW(check(batch_of({{5}, {6}}), rules()));
}

TEST_CASE("errors name the entry") {
  CHECK_THROWS_WITH_AS(check(Batch(), rules()), "the batch is empty", InvalidInput);
  CHECK_THROWS_WITH_AS(check(one_entry(100, 0, {0}), rules()),
                       "entry 0: token id 100 is outside of the vocabulary of 100", InvalidInput);
  CHECK_THROWS_AS(check(one_entry(-1, 0, {0}), rules()), InvalidInput);
  CHECK_THROWS_WITH_AS(check(one_entry(1, -1, {0}), rules()), "entry 0: position -1 is negative",
                       InvalidInput);
  CHECK_THROWS_AS(check(one_entry(1, 50, {0}), rules()), InvalidInput);
  CHECK_NOTHROW(check(one_entry(1, 49, {0}), rules()));
  CHECK_THROWS_WITH_AS(check(one_entry(1, 0, {}), rules()), "entry 0: it belongs to no sequence",
                       InvalidInput);
  CHECK_THROWS_WITH_AS(check(one_entry(1, 0, {3}), rules()),
                       "entry 0: sequence id 3 is not in 0..2 (n_seq_max of the context)", InvalidInput);
}

TEST_CASE("an entry of several sequences needs a shared KV cache") {
  auto alone = rules();
  alone.shares_entries = false;
  CHECK_NOTHROW(check(one_entry(1, 0, {0, 1}), rules()));
  CHECK_THROWS_AS(check(one_entry(1, 0, {0, 1}), alone), InvalidInput);
}

TEST_CASE("positions have neither gaps nor repeats") {
  CHECK_THROWS_WITH_AS(check(batch_of({{0}, {2}}), rules()), "sequence 0: position 1 is missing",
                       InvalidInput);
  CHECK_THROWS_WITH_AS(check(batch_of({{0}, {1}, {1}}), rules()), "sequence 0: position 1 occurs twice",
                       InvalidInput);
  CHECK_THROWS_AS(check(batch_of({{5}}), rules(), 3), InvalidInput);
  CHECK_THROWS_AS(check(batch_of({{3}}), rules(), 3), InvalidInput);
}

TEST_CASE("with M-RoPE positions must only come after the memory") {
  auto sections = rules();
  sections.n_positions = 4;
  CHECK_NOTHROW(check(batch_of({{9}, {9}, {12}}), sections, 3));
  CHECK_THROWS_AS(check(batch_of({{3}, {9}}), sections, 3), InvalidInput);
}

TEST_CASE("a batch that is computed at once fits one ubatch") {
  auto at_once = rules();
  at_once.at_once = true;
  CHECK_NOTHROW(check(batch_of({{0}, {1}, {2}, {3}}), at_once));
  CHECK_THROWS_AS(check(batch_of({{0}, {1}, {2}, {3}, {4}}), at_once), InvalidInput);
  CHECK_NOTHROW(check(batch_of({{0}, {0, 1}}), at_once));
  at_once.kv_unified = false;
  CHECK_THROWS_AS(check(batch_of({{0}, {0, 1}}), at_once), InvalidInput);
}

TEST_CASE("without a memory all tokens are outputs and positions are free") {
  auto encoder = rules();
  encoder.at_once = true;
  encoder.has_memory = false;
  CHECK_NOTHROW(check(batch_of({{0}, {5}, {5}}), encoder, 9));
  encoder.n_outputs_max = 2;
  CHECK_THROWS_AS(check(batch_of({{0}, {5}, {5}}), encoder), InvalidInput);
}

}  // namespace llamatap
