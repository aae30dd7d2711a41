#include "engine/context/batch_check.hpp"

#include <algorithm>
#include <string>
#include <vector>

#include "engine/error.hpp"

namespace llamatap {

namespace {

std::string number(int64_t value) { return std::to_string(value); }

void check_entry(const Batch& batch, int32_t row, const BatchRules& rules) {
  const auto require = [row](bool good, const auto& what) {
    if (!good) throw InvalidInput("entry " + number(row) + ": " + what());
  };
  if (batch.has_tokens()) {
    const int32_t token = batch.tokens()[row];
    require(token >= 0 && token < rules.n_vocab, [&] {
      return "token id " + number(token) + " is outside of the vocabulary of " + number(rules.n_vocab);
    });
  }
  const int32_t position = batch.positions()[row];
  require(position >= 0, [&] { return "position " + number(position) + " is negative"; });
  require(position < rules.position_limit, [&] {
    return "position " + number(position) + " is out of range: the model has " +
           number(rules.position_limit) + " positions";
  });
  const auto& sequences = batch.sequences()[row];
  require(!sequences.empty(), [] { return std::string("it belongs to no sequence"); });
  require(sequences.size() == 1 || rules.shares_entries, [] {
    return std::string(
        "it belongs to several sequences, which needs kv_unified=True and a model with attention; add it "
        "once per sequence");
  });
  for (const int32_t seq : sequences) {
    require(seq >= 0 && seq < static_cast<int32_t>(rules.n_seq_max), [&] {
      return "sequence id " + number(seq) + " is not in 0.." + number(rules.n_seq_max - 1) +
             " (n_seq_max of the context)";
    });
  }
}

/// Checks a batch that is computed in one ubatch.
void check_at_once(int32_t n, bool several_sequences, const BatchRules& rules) {
  if (n > static_cast<int32_t>(rules.n_ubatch)) {
    throw InvalidInput("a model without causal attention sees all " + number(n) +
                       " tokens at once; the context's n_ubatch allows " + number(rules.n_ubatch));
  }
  if (!rules.has_memory && rules.n_outputs_max > 0 && n > static_cast<int32_t>(rules.n_outputs_max)) {
    throw InvalidInput("a model without causal attention makes all " + number(n) +
                       " tokens outputs; the context's n_outputs_max allows " + number(rules.n_outputs_max));
  }
  if (rules.has_memory && several_sequences && !rules.kv_unified) {
    throw InvalidInput(
        "a model without causal attention computes several sequences with kv_unified=True only");
  }
}

/// Checks the sorted positions of a sequence in a batch: they must continue the memory without a gap; with
/// M-RoPE, they must be above its last position.
void check_positions(const std::vector<int32_t>& positions, int32_t seq, int32_t last,
                     const BatchRules& rules) {
  const auto what = "sequence " + number(seq) + ": ";
  if (rules.n_positions > 1) {
    if (positions.front() > last) return;
    throw InvalidInput(what + "position " + number(positions.front()) + " must come after " + number(last) +
                       ", the last one in memory");
  }
  if (last >= 0 && positions.front() != last + 1) {
    throw InvalidInput(what + "the next position must be " + number(last + 1) + ", not " +
                       number(positions.front()) + "; remove what is in memory or continue it");
  }
  for (size_t i = 1; i < positions.size(); ++i) {
    if (positions[i] == positions[i - 1]) {
      throw InvalidInput(what + "position " + number(positions[i]) + " occurs twice");
    }
    if (positions[i] != positions[i - 1] + 1) {
      throw InvalidInput(what + "position " + number(positions[i - 1] + 1) + " is missing");
    }
  }
}

}  // namespace

void check_batch(const Batch& batch, const BatchRules& rules, const std::function<int32_t(int32_t)>& last) {
  if (batch.size() == 0) throw InvalidInput("the batch is empty");
  std::vector<std::vector<int32_t>> positions(rules.n_seq_max);
  for (int32_t row = 0; row < batch.size(); ++row) {
    check_entry(batch, row, rules);
    for (const int32_t seq : batch.sequences()[row]) positions[seq].push_back(batch.positions()[row]);
  }
  if (rules.at_once) {
    const auto used = std::count_if(positions.begin(), positions.end(),
                                    [](const std::vector<int32_t>& of_seq) { return !of_seq.empty(); });
    check_at_once(batch.size(), used > 1, rules);
  }
  if (!rules.has_memory) return;
  for (size_t i = 0; i < positions.size(); ++i) {
    if (positions[i].empty()) continue;
    const auto seq = static_cast<int32_t>(i);
    std::sort(positions[i].begin(), positions[i].end());
    check_positions(positions[i], seq, last(seq), rules);
  }
}

}  // namespace llamatap
