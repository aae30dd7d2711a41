#include "engine/context/kv_memory.hpp"

#include <llama.h>

#include <algorithm>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/model/mtp_blocks.hpp"
#include "engine/private/cells.hpp"
#include "engine/private/engine_context.hpp"

namespace llamatap {

namespace {

void check_range(int32_t p0, int32_t p1) {
  if (p0 < -1 || p1 < -1 || (p0 >= 0 && p1 >= 0 && p0 > p1)) {
    throw InvalidInput("positions from " + std::to_string(p0) + " up to " + std::to_string(p1) +
                       " are not a range");
  }
}

/// [p0, p1), where -1 is an open end.
PositionRange range_of(int32_t p0, int32_t p1) {
  return {std::max(p0, 0), p1 < 0 ? int64_t{INT32_MAX} : int64_t{p1}};
}

}  // namespace

KvMemory::KvMemory(const Model& model, const ContextOptions& options)
    : model_(model),
      options_(options),
      is_recurrent_(has_recurrent_memory(options, model)),
      is_borrowed_(options.mtp && mtp_blocks(model.arch()).borrows_memory) {}

void KvMemory::attach(llama_context* context) {
  context_ = context;
  rewindable_.assign(options_.n_seq_max, 0);
}

bool KvMemory::exists() const { return llama_get_memory(context_) != nullptr && !model_.is_encoder(); }

int64_t KvMemory::used_cells() const { return exists() ? Cells(context_).used() : 0; }

int32_t KvMemory::last_or_none(int32_t seq) const {
  return exists() ? llama_memory_seq_pos_max(llama_get_memory(context_), seq) : -1;
}

void KvMemory::check_sequence(int32_t seq) const {
  if (seq < 0 || seq >= static_cast<int32_t>(options_.n_seq_max)) {
    throw InvalidInput("sequence id " + std::to_string(seq) + " is not in 0.." +
                       std::to_string(options_.n_seq_max - 1) + " (n_seq_max of the context)");
  }
}

bool KvMemory::can_remove_suffix(int32_t seq, int32_t p0) const {
  const Cells cells(context_);
  // Also with swa_full: the engine reuses cells that no window reaches.
  if (!cells.dropped(seq)) return true;
  auto left = cells.held(seq);
  left.remove(range_of(p0, -1));
  return left.reach_back(model_.n_swa());
}

Unsupported KvMemory::windows_lost() const {
  return Unsupported(
      "the sliding-window layers of " + model_.arch() +
      " no longer hold what the sequence's next token would see; remove the whole sequence, or "
      "make the context with swa_full=True and, for several sequences, kv_unified=False");
}

void KvMemory::note_written(bool completely) {
  written_cells_ = completely ? std::max(written_cells_, cells_in_use(context_)) : kAllCells;
}

llama_memory_i* KvMemory::engine_memory() const {
  if (!exists()) throw Unsupported("this model keeps no memory of past tokens");
  return llama_get_memory(context_);
}

llama_memory_i* KvMemory::own_memory() const {
  if (is_borrowed()) {
    throw Unsupported("the blocks of " + model_.arch() +
                      " attend to the target's memory and have none of their own; change the target's");
  }
  return engine_memory();
}

bool KvMemory::is_empty() const {
  if (!exists()) return true;
  const Cells cells(context_);
  for (int32_t seq = 0; seq < static_cast<int32_t>(options_.n_seq_max); ++seq) {
    if (cells.last(seq) >= 0) return false;
  }
  return true;
}

void KvMemory::drop(int32_t seq) {
  llama_memory_seq_rm(llama_get_memory(context_), seq, -1, -1);
  rewindable_[seq] = 0;
  // Do not zero with MTP: blocks computed in turn share cells, found by position.
  if (is_empty()) empty(/*zero=*/!options_.mtp);
}

void KvMemory::clear() {
  if (!exists()) return;
  own_memory();
  written_cells_ = kAllCells;
  empty(/*zero=*/true);
}

void KvMemory::empty(bool zero) {
  std::fill(rewindable_.begin(), rewindable_.end(), 0);
  auto* memory = llama_get_memory(context_);
  if (!zero) {
    llama_memory_clear(memory, /*data=*/false);
    return;
  }
  // Without flash attention each value channel is a row: too many small calls on a GPU.
  const bool all = written_cells_ == kAllCells || (model_.on_gpu() && !internals::flash_attention(context_));
  const int64_t zeroed = all ? -1 : zero_cells(context_, written_cells_);
  if (zeroed < 0) llama_memory_clear(memory, /*data=*/true);
  zeroed_cells_ += zeroed < 0 ? int64_t{llama_n_ctx(context_)} : zeroed;
  written_cells_ = 0;
}

void KvMemory::remove(int32_t seq, int32_t p0, int32_t p1) {
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = own_memory();
  const Cells cells(context_);
  const auto range = range_of(p0, p1);
  if (!cells.any(seq, range)) return;
  if (cells.within(seq, range)) {
    drop(seq);
    return;
  }
  const int32_t last = cells.last(seq);
  const bool is_suffix = range.end > last;
  // The engine keeps the states of the last n_rs_seq+1 tokens of one ubatch, for one rollback.
  const bool rewinds = is_suffix && last + 1 - range.begin <= rewindable_[seq];
  if (is_recurrent_ && !rewinds) {
    throw Unsupported("the memory of " + model_.arch() +
                      " cannot remove this part of a sequence; remove the whole of it" +
                      (options_.n_rs_seq > 0 ? ", or at most " + std::to_string(rewindable_[seq]) +
                                                   " of its last tokens (fewer than in the last decode, at "
                                                   "most n_rs_seq, once between two decodes)"
                                             : ", or save it before and restore it"));
  }
  if (is_suffix && !can_remove_suffix(seq, p0)) throw windows_lost();
  if (!llama_memory_seq_rm(memory, seq, p0, p1)) {
    throw Unsupported("the memory of " + model_.arch() +
                      " cannot remove a part of a sequence; remove the whole of it, or save it before and "
                      "restore it");
  }
  rewindable_[seq] = 0;
}

void KvMemory::copy(int32_t from, int32_t to, int32_t p0, int32_t p1) {
  check_sequence(from);
  check_sequence(to);
  check_range(p0, p1);
  auto* memory = own_memory();
  const Cells cells(context_);
  const auto range = range_of(p0, p1);
  if (from == to || range.begin == range.end) return;
  const bool whole = cells.within(from, range);
  if (!whole && (!options_.kv_unified || is_recurrent_)) {
    throw Unsupported(
        "only a whole sequence can be copied in this context; a part needs kv_unified=True and a model "
        "without recurrent state");
  }
  // The engine rolls back a recurrent state in all sequences that share it, and copies it as it was before
  // the rollback. With n_rs_seq, give each sequence its own.
  const bool own_state = is_recurrent_ && options_.n_rs_seq > 0;
  const std::string state = own_state ? saved(from, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY) : std::string();
  // Clear the target first: of two entries at one position, attention would read both.
  if (whole) {
    drop(to);
  } else {
    if (cells.dropped(from) || cells.dropped(to)) {
      auto after = cells.held(to);
      after.remove(range);
      after.add(cells.held(from), range);
      if (!after.reach_back(model_.n_swa())) throw windows_lost();
    }
    llama_memory_seq_rm(memory, to, p0, p1);
  }
  llama_memory_seq_cp(memory, from, to, whole ? -1 : p0, whole ? -1 : p1);
  if (own_state && cells.last(from) >= 0 && !load(to, state, LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY)) {
    drop(to);
    throw EngineFailed("the engine could not copy the recurrent state of sequence " + std::to_string(from));
  }
  internals::apply_memory_updates(context_);
}

void KvMemory::keep(int32_t seq) {
  check_sequence(seq);
  own_memory();
  // The engine's seq_keep ignores the other streams of a cache that is not unified.
  for (int32_t other = 0; other < static_cast<int32_t>(options_.n_seq_max); ++other) {
    if (other != seq) drop(other);
  }
}

void KvMemory::shift(int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = own_memory();
  if (!llama_memory_can_shift(memory) || !internals::can_shift(context_)) {
    throw Unsupported("the memory of " + model_.arch() + " cannot move positions");
  }
  const Cells cells(context_);
  const auto range = range_of(p0, p1);
  if (!cells.any(seq, range) || delta == 0) return;
  auto moved = cells.held(seq);
  moved.remove({INT64_MIN, range.begin});
  moved.remove({range.end, INT64_MAX});
  const auto target = [&](int32_t position) { return int64_t{position} + delta; };
  if (!moved.all.empty() &&
      (target(moved.all.front()) < 0 || target(moved.all.back()) >= model_.position_limit())) {
    throw InvalidInput("moving by " + std::to_string(delta) + " puts positions outside of 0.." +
                       std::to_string(model_.position_limit() - 1));
  }
  // A cell has one position for all its sequences.
  const auto sharers = cells.sharers(seq, range, static_cast<int32_t>(options_.n_seq_max));
  if (is_recurrent_ && (!cells.within(seq, range) || sharers.size() > 1)) {
    throw Unsupported(
        "the memory of " + model_.arch() +
        " can only move a whole sequence that shares nothing with others (by copy(), or batches "
        "of several sequences)");
  }
  for (const int32_t other : sharers) {
    const auto after = cells.held_after(other, seq, range, delta);
    const auto twice = std::adjacent_find(after.all.begin(), after.all.end());
    if (twice != after.all.end()) {
      throw InvalidInput("moving by " + std::to_string(delta) + " puts tokens of sequence " +
                         std::to_string(other) + " on positions that others hold (" + std::to_string(*twice) +
                         (other == seq ? "" : "; it shares tokens with sequence " + std::to_string(seq)) +
                         "); remove those first");
    }
    if (!after.reach_back(model_.n_swa())) throw windows_lost();
  }
  llama_memory_seq_add(memory, seq, p0, p1, delta);
  for (const int32_t other : sharers) rewindable_[other] = 0;
  // Apply it now: an interrupted decode would leave the cache half moved.
  internals::apply_memory_updates(context_);
}

int32_t KvMemory::first(int32_t seq) const {
  check_sequence(seq);
  return llama_memory_seq_pos_min(engine_memory(), seq);
}

int32_t KvMemory::last(int32_t seq) const {
  check_sequence(seq);
  return llama_memory_seq_pos_max(engine_memory(), seq);
}

std::string KvMemory::save(int32_t seq) const {
  check_sequence(seq);
  own_memory();
  return saved(seq);
}

std::string KvMemory::saved(int32_t seq, uint32_t flags) const {
  std::string state(llama_state_seq_get_size_ext(context_, seq, flags), '\0');
  const size_t written = llama_state_seq_get_data_ext(context_, reinterpret_cast<uint8_t*>(state.data()),
                                                      state.size(), seq, flags);
  if (written == 0) throw EngineFailed("the engine could not save sequence " + std::to_string(seq));
  state.resize(written);
  return state;
}

bool KvMemory::load(int32_t seq, const std::string& state, uint32_t flags) {
  return llama_state_seq_set_data_ext(context_, reinterpret_cast<const uint8_t*>(state.data()), state.size(),
                                      seq, flags) == state.size();
}

void KvMemory::restore(int32_t seq, const std::string& state) {
  check_sequence(seq);
  auto* memory = own_memory();
  // The engine drops a sequence that it fails to restore: keep a copy.
  const bool held = Cells(context_).last(seq) >= 0;
  const std::string before = held ? saved(seq) : std::string();
  std::string reason;
  const auto loads = [&](const std::string& bytes) {
    const LogScope log;
    try {
      if (guarded("the engine stopped", [&] { return load(seq, bytes); })) {
        note_written(/*completely=*/true);
        return true;
      }
      reason = log.text();
    } catch (const EngineFailed& error) {
      reason = error.what();
    }
    note_written(/*completely=*/false);
    llama_memory_seq_rm(memory, seq, -1, -1);
    return false;
  };
  rewindable_[seq] = 0;
  // Restoring an empty sequence would not remove the current one.
  if (held) llama_memory_seq_rm(memory, seq, -1, -1);
  if (loads(state)) return;
  const std::string why = reason;
  const bool lost = held && !loads(before);
  throw InvalidInput("this state does not fit into this context: " + why +
                     (lost
                          ? "; sequence " + std::to_string(seq) +
                                " is now empty: its previous tokens were shared with others and no longer fit"
                          : ""));
}

void KvMemory::note_rewindable(const Batch& batch, const std::vector<int32_t>& given,
                               const std::vector<std::vector<int32_t>>& ubatches) {
  for (const auto& ubatch : ubatches) {
    std::vector<int32_t> rows(options_.n_seq_max, 0);
    for (const int32_t index : ubatch) {
      for (const int32_t seq : batch.sequences()[given[index]]) ++rows[seq];
    }
    for (size_t seq = 0; seq < rows.size(); ++seq) {
      if (rows[seq] > 0) rewindable_[seq] = std::min(rows[seq] - 1, static_cast<int32_t>(options_.n_rs_seq));
    }
  }
}

void KvMemory::undo_failed_decode(const std::vector<int32_t>& sequences,
                                  const std::vector<int32_t>& last_positions) {
  if (!exists() || is_borrowed()) return;
  auto* memory = llama_get_memory(context_);
  for (size_t i = 0; i < sequences.size(); ++i) {
    const int32_t seq = sequences[i];
    const int32_t end = last_positions[i] + 1;
    if (llama_memory_seq_pos_max(memory, seq) == last_positions[i]) continue;
    if (end == 0 || is_recurrent_ || !can_remove_suffix(seq, end) ||
        !llama_memory_seq_rm(memory, seq, end, -1)) {
      drop(seq);
    }
  }
}

}  // namespace llamatap
