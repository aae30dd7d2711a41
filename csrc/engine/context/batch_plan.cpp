// The part of Context that looks at a batch before anything is computed: whether it is right, and which
// engine calls it takes.

#include <llama.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "engine/context/context.hpp"
#include "engine/error.hpp"

namespace llamatap {

void Context::validate(const Batch& batch) const {
  const int32_t n = batch.size();
  if (n == 0) throw InvalidInput("the batch is empty");
  if (drafts()) {
    check_drafting(batch);
  } else if (batch.has_embeddings()) {
    if (batch.has_tokens()) throw InvalidInput("only a context that drafts takes states beside tokens");
    if (!model_->takes_embeddings()) {
      throw Unsupported("the engine computes " + model_->arch() + " of tokens only, not of embeddings");
    }
    if (batch.n_embd() != model_->n_embd_input()) {
      throw InvalidInput("embeddings must be " + std::to_string(model_->n_embd_input()) + " wide, not " +
                         std::to_string(batch.n_embd()));
    }
  }
  std::vector<std::vector<int32_t>> positions(options_.n_seq_max);
  std::set<int32_t> used;
  for (int32_t row = 0; row < n; ++row) {
    const auto where = [row] { return "entry " + std::to_string(row) + ": "; };
    if (batch.has_tokens()) {
      const int32_t token = batch.tokens()[row];
      if (token < 0 || token >= model_->vocab().size()) {
        throw InvalidInput(where() + "token id " + std::to_string(token) +
                           " is outside of the vocabulary of " + std::to_string(model_->vocab().size()));
      }
    }
    const int32_t position = batch.positions()[row];
    if (position < 0) throw InvalidInput(where() + "position " + std::to_string(position) + " is negative");
    if (position >= model_->position_limit()) {
      throw InvalidInput(where() + "position " + std::to_string(position) + " is beyond the " +
                         std::to_string(model_->position_limit()) + " that the model has");
    }
    const auto& sequences = batch.sequences()[row];
    if (sequences.empty()) throw InvalidInput(where() + "it belongs to no sequence");
    if (sequences.size() > 1 && !shares_entries()) {
      throw InvalidInput(where() +
                         "it belongs to several sequences, which takes kv_unified=True and a model with " +
                         "attention; add it once for each");
    }
    for (const int32_t seq : sequences) {
      if (seq < 0 || seq >= static_cast<int32_t>(options_.n_seq_max)) {
        throw InvalidInput(where() + "sequence id " + std::to_string(seq) + " is not in 0.." +
                           std::to_string(options_.n_seq_max - 1) + " (n_seq_max of the context)");
      }
      positions[seq].push_back(position);
      used.insert(seq);
    }
    if (sequences.size() > 1 && !options_.kv_unified) {
      throw InvalidInput(where() + "it belongs to several sequences; that needs kv_unified=True");
    }
  }
  if (at_once()) {
    if (n > static_cast<int32_t>(n_ubatch())) {
      throw InvalidInput("a model without causal attention sees all " + std::to_string(n) +
                         " tokens at once; the context's n_ubatch allows " + std::to_string(n_ubatch()));
    }
    if (!has_memory() && options_.n_outputs_max > 0 && n > static_cast<int32_t>(options_.n_outputs_max)) {
      throw InvalidInput("a model without causal attention makes all " + std::to_string(n) +
                         " tokens outputs; the context's n_outputs_max allows " +
                         std::to_string(options_.n_outputs_max));
    }
    if (!has_memory()) return;
    if (used.size() > 1 && !options_.kv_unified) {
      throw InvalidInput(
          "a model without causal attention computes several sequences with kv_unified=True only");
    }
  }
  for (int32_t seq = 0; seq < static_cast<int32_t>(options_.n_seq_max); ++seq) {
    auto& of_seq = positions[seq];
    if (of_seq.empty()) continue;
    std::sort(of_seq.begin(), of_seq.end());
    const int32_t last = llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq);
    const auto what = "sequence " + std::to_string(seq) + ": ";
    if (model_->n_positions() > 1) {
      if (of_seq.front() <= last) {
        throw InvalidInput(what + "position " + std::to_string(of_seq.front()) + " must come after " +
                           std::to_string(last) + ", the last one in memory");
      }
      continue;
    }
    if (last >= 0 && of_seq.front() != last + 1) {
      throw InvalidInput(what + "the next position must be " + std::to_string(last + 1) + ", not " +
                         std::to_string(of_seq.front()) + "; remove what is in memory or continue it");
    }
    for (size_t i = 1; i < of_seq.size(); ++i) {
      if (of_seq[i] == of_seq[i - 1]) {
        throw InvalidInput(what + "position " + std::to_string(of_seq[i]) + " occurs twice");
      }
      if (of_seq[i] != of_seq[i - 1] + 1) {
        throw InvalidInput(what + "position " + std::to_string(of_seq[i - 1] + 1) + " is missing");
      }
    }
  }
}

std::vector<Piece> Context::plan(const Batch& batch, const DecodeObserver* observer,
                                 bool memory_is_scratch) const {
  const auto n = static_cast<size_t>(batch.size());
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  if (!has_memory()) return {Piece{order, order, observer != nullptr && memory_is_scratch}};

  // The engine wants the positions of a sequence in rising order.
  std::vector<int32_t> last(options_.n_seq_max, -1);
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

  const auto needed = [&](int32_t row) { return observer != nullptr && observer->needs_last_block(row); };
  const bool any_output =
      std::any_of(order.begin(), order.end(), [&](int32_t r) { return batch.outputs()[r]; });

  // Entries whose last block is wanted but whose logits are not come first, in pieces that end before
  // the output head. The others start, in each sequence, with its first output.
  std::vector<int32_t> early;
  std::vector<int32_t> late;
  std::vector<bool> started(options_.n_seq_max, false);
  bool early_needed = false;
  for (const int32_t row : order) {
    const auto& sequences = batch.sequences()[row];
    const bool is_late = batch.outputs()[row] || std::any_of(sequences.begin(), sequences.end(),
                                                             [&](int32_t seq) { return started[seq]; });
    if (is_late) {
      for (const int32_t seq : sequences) started[seq] = true;
    }
    early_needed = early_needed || (!is_late && needed(row));
    (is_late ? late : early).push_back(row);
  }
  if (any_output && !early_needed) {
    late = order;
    early.clear();
  }

  if (at_once()) {
    late = order;
    early.clear();
  }
  std::vector<Piece> pieces;
  const size_t outputs_max = options_.n_outputs_max > 0 ? options_.n_outputs_max : n_batch();
  const auto cut = [&](const std::vector<int32_t>& rows, bool may_stop, size_t longest) {
    Piece piece;
    piece.may_stop = may_stop;
    for (const int32_t row : rows) {
      const bool flagged = batch.outputs()[row] || needed(row) || (any_output && computes_all_rows());
      if (piece.rows.size() == longest || (flagged && piece.output_rows.size() == outputs_max)) {
        pieces.push_back(std::move(piece));
        piece = Piece{};
        piece.may_stop = may_stop;
      }
      piece.rows.push_back(row);
      if (flagged) piece.output_rows.push_back(row);
    }
    if (!piece.rows.empty()) pieces.push_back(std::move(piece));
  };
  const bool early_may_stop = observer != nullptr && (memory_is_scratch || observer->stop_keeps_memory());
  // The engine makes room for logits of every flagged entry of a call, computed or not.
  // Looking for places for a second ubatch, the engine loses tokens that the first one's windows still reach.
  const bool one_ubatch = early_needed || model_->n_swa() > 0;
  cut(early, early_may_stop, one_ubatch ? std::min(n_ubatch(), n_batch()) : n_batch());
  cut(late, observer != nullptr && memory_is_scratch && !any_output,
      model_->n_swa() > 0 && !at_once() ? std::min(n_ubatch(), n_batch()) : n_batch());
  if (at_once() && pieces.size() > 1) {
    throw InvalidInput(
        "a model without causal attention sees all tokens at once, but more of the batch pass "
        "through its last block than the context's n_outputs_max allows (" +
        std::to_string(outputs_max) + ")");
  }
  return pieces;
}

}  // namespace llamatap
