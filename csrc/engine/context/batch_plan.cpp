#include "engine/context/batch_plan.hpp"

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>

#include "engine/error.hpp"

namespace llamatap {

namespace {

/// An order in which the positions of each sequence increase, as the engine requires: the batch's own order
/// if possible.
std::vector<int32_t> rising_order(const Batch& batch, uint32_t n_seq_max) {
  std::vector<int32_t> order(static_cast<size_t>(batch.size()));
  std::iota(order.begin(), order.end(), 0);
  std::vector<int32_t> last(n_seq_max, -1);
  bool rising = true;
  for (const int32_t row : order) {
    for (const int32_t seq : batch.sequences()[row]) {
      rising = rising && batch.positions()[row] > last[seq];
      last[seq] = batch.positions()[row];
    }
  }
  if (!rising) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return batch.positions()[a] < batch.positions()[b]; });
  }
  return order;
}

/// Splits the entries: those before the first output of each of their sequences, and the others.
std::pair<std::vector<int32_t>, std::vector<int32_t>> split_at_outputs(const Batch& batch,
                                                                       const std::vector<int32_t>& order,
                                                                       uint32_t n_seq_max) {
  std::vector<int32_t> early;
  std::vector<int32_t> late;
  std::vector<bool> started(n_seq_max, false);
  for (const int32_t row : order) {
    const auto& sequences = batch.sequences()[row];
    const bool is_late = batch.outputs()[row] || std::any_of(sequences.begin(), sequences.end(),
                                                             [&](int32_t seq) { return started[seq]; });
    if (is_late) {
      for (const int32_t seq : sequences) started[seq] = true;
    }
    (is_late ? late : early).push_back(row);
  }
  return {std::move(early), std::move(late)};
}

/// Limits of a piece.
struct Cut {
  size_t longest;       // entries
  size_t most_flagged;  // entries that pass through the last block
  bool may_stop;
};

template <typename Flagged>
void cut(const std::vector<int32_t>& rows, const Cut& limits, const Flagged& flagged,
         std::vector<Piece>& pieces) {
  Piece piece;
  piece.may_stop = limits.may_stop;
  for (const int32_t row : rows) {
    const bool is_flagged = flagged(row);
    if (piece.rows.size() == limits.longest ||
        (is_flagged && piece.output_rows.size() == limits.most_flagged)) {
      pieces.push_back(std::exchange(piece, Piece{{}, {}, limits.may_stop}));
    }
    piece.rows.push_back(row);
    if (is_flagged) piece.output_rows.push_back(row);
  }
  if (!piece.rows.empty()) pieces.push_back(std::move(piece));
}

}  // namespace

std::vector<Piece> plan_batch(const Batch& batch, const BatchRules& rules, const PlanWishes& wishes) {
  if (!rules.has_memory) {
    std::vector<int32_t> all(static_cast<size_t>(batch.size()));
    std::iota(all.begin(), all.end(), 0);
    return {Piece{all, all, wishes.scratch}};
  }
  const auto order = rising_order(batch, rules.n_seq_max);
  const auto needed = [&](int32_t row) {
    return !wishes.needs_last_block.empty() && wishes.needs_last_block[row];
  };
  const auto is_output = [&](int32_t row) { return batch.outputs()[row]; };
  const bool any_output = std::any_of(order.begin(), order.end(), is_output);

  // Entries that need the last block but no logits come first, in pieces that stop before the output head.
  // The others start with the first output of their sequence.
  auto [early, late] = split_at_outputs(batch, order, rules.n_seq_max);
  const bool early_needed = std::any_of(early.begin(), early.end(), needed);
  if (rules.at_once || (any_output && !early_needed)) {
    late = order;
    early.clear();
  }

  const size_t outputs_max = rules.n_outputs_max > 0 ? rules.n_outputs_max : rules.n_batch;
  // The engine reserves logits for every flagged entry of a call, computed or not.
  const auto flagged = [&](int32_t row) {
    return is_output(row) || needed(row) || (any_output && rules.computes_all_rows);
  };
  // With a second ubatch, the engine overwrites cells that the windows of the first one still need.
  const size_t one_ubatch = std::min(rules.n_ubatch, rules.n_batch);
  std::vector<Piece> pieces;
  cut(early, {early_needed || rules.n_swa > 0 ? one_ubatch : rules.n_batch, outputs_max, wishes.may_stop},
      flagged, pieces);
  cut(late,
      {rules.n_swa > 0 && !rules.at_once ? one_ubatch : rules.n_batch, outputs_max,
       wishes.scratch && !any_output},
      flagged, pieces);
  if (rules.at_once && pieces.size() > 1) {
    throw InvalidInput(
        "a model without causal attention sees all tokens at once, but more entries pass through its last "
        "block than the context's n_outputs_max allows (" +
        std::to_string(outputs_max) + ")");
  }
  return pieces;
}

}  // namespace llamatap
