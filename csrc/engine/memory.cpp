// The part of Context that looks after its memory: the KV cache, or the state of recurrent models.

#include <llama.h>

#include <algorithm>

#include "engine/abort.hpp"
#include "engine/context.hpp"
#include "engine/error.hpp"
#include "engine/internals.hpp"
#include "engine/log.hpp"

namespace llamatap {

namespace {

void check_range(int32_t p0, int32_t p1) {
  if (p0 < -1 || p1 < -1 || (p0 >= 0 && p1 >= 0 && p0 > p1)) {
    throw InvalidInput("positions from " + std::to_string(p0) + " up to " + std::to_string(p1) +
                       " are no range");
  }
}

/// Half-open ranges, where -1 stands for an open end.
Positions::Range range_of(int32_t p0, int32_t p1) {
  return {std::max(p0, 0), p1 < 0 ? int64_t{INT32_MAX} : int64_t{p1}};
}

}  // namespace

void Context::check_sequence(int32_t seq) const {
  if (seq < 0 || seq >= static_cast<int32_t>(options_.n_seq_max)) {
    throw InvalidInput("sequence id " + std::to_string(seq) + " is not in 0.." +
                       std::to_string(options_.n_seq_max - 1) + " (n_seq_max of the context)");
  }
}

/// Whether [p0, end) can be taken from a sequence: sliding-window layers must still hold the window before
/// p0.
bool Context::can_remove_suffix(int32_t seq, int32_t p0) const {
  const int32_t window = model_->n_swa();
  if (window == 0 || p0 <= 0) return true;
  // Also with swa_full: the engine lets other tokens have the places of those that no window reaches.
  const int64_t first = held_[seq].empty() ? 0 : held_[seq].first();
  const int32_t kept = llama_memory_seq_pos_min(llama_get_memory(context_.get()), seq);
  return kept <= std::max<int64_t>(first, p0 - window);
}

llama_memory_i* Context::engine_memory() const {
  if (!has_memory()) throw Unsupported("this model keeps no memory of past tokens");
  return llama_get_memory(context_.get());
}

llama_memory_i* Context::own_memory() const {
  if (borrows_memory()) {
    throw Unsupported("the blocks of " + model_->arch() +
                      " attend to the target's memory and have none of their own; change the target's");
  }
  return engine_memory();
}

bool Context::is_empty() const {
  for (int32_t seq = 0; has_memory() && seq < static_cast<int32_t>(options_.n_seq_max); ++seq) {
    if (llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq) >= 0) return false;
  }
  return true;
}

void Context::drop(int32_t seq) {
  llama_memory_seq_rm(llama_get_memory(context_.get()), seq, -1, -1);
  held_[seq] = {};
  rewindable_[seq] = 0;
  if (std::all_of(held_.begin(), held_.end(), [](const Positions& held) { return held.empty(); })) {
    // MTP blocks that are computed in turn keep theirs in the same places, and find them by position alone.
    clear_memory(/*data=*/!options_.mtp);
  }
}

void Context::memory_clear() {
  const Use use = hold();
  if (!has_memory()) return;
  own_memory();
  clear_memory(/*data=*/true);
}

void Context::clear_memory(bool data) {
  // Some kernels multiply what is masked by 0 rather than leave it out, which NaN survives.
  llama_memory_clear(llama_get_memory(context_.get()), data);
  std::fill(held_.begin(), held_.end(), Positions());
  std::fill(rewindable_.begin(), rewindable_.end(), 0);
}

void Context::memory_remove(int32_t seq, int32_t p0, int32_t p1) {
  const Use use = hold();
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = own_memory();
  auto& held = held_[seq];
  const auto range = range_of(p0, p1);
  if (!held.overlaps(range)) return;
  if (range.begin <= held.first() && range.end > held.last()) {
    drop(seq);
    return;
  }
  // The engine keeps a state for each of the last n_rs_seq+1 tokens of one ubatch, for one way back.
  const bool rewinds = range.end > held.last() && held.last() + 1 - range.begin <= rewindable_[seq];
  if (recurrent_ && !rewinds) {
    throw Unsupported("the memory of " + model_->arch() +
                      " cannot give up this part of a sequence; remove the whole of it" +
                      (options_.n_rs_seq > 0
                           ? ", or at most " + std::to_string(rewindable_[seq]) +
                                 " of its last tokens (fewer than the last decode brought, at most n_rs_seq, "
                                 "once between two decodes)"
                           : ", or save it before and restore it"));
  }
  if (range.begin <= held.last() && !can_remove_suffix(seq, p0)) {
    throw Unsupported("the sliding-window layers of " + model_->arch() +
                      " no longer hold what comes before position " + std::to_string(p0) +
                      "; remove the whole sequence, or make the context with swa_full=True and, for several "
                      "sequences, kv_unified=False");
  }
  if (!llama_memory_seq_rm(memory, seq, p0, p1)) {
    throw Unsupported("the memory of " + model_->arch() +
                      " cannot give up a part of a sequence; remove the whole of it, or save it before and "
                      "restore it");
  }
  held.remove(range);
  rewindable_[seq] = 0;
}

void Context::memory_copy(int32_t from, int32_t to, int32_t p0, int32_t p1) {
  const Use use = hold();
  check_sequence(from);
  check_sequence(to);
  check_range(p0, p1);
  auto* memory = own_memory();
  const auto range = range_of(p0, p1);
  if (from == to || range.begin == range.end) return;
  const auto part = held_[from].within(range);
  const bool whole = part.count() == held_[from].count();
  if (!whole && (!options_.kv_unified || recurrent_)) {
    throw Unsupported(
        "only a whole sequence can be copied in this context; a part needs kv_unified=True and a model "
        "without recurrent state");
  }
  // Two entries of one sequence at one position would both be attended to.
  if (whole) {
    drop(to);
  } else {
    llama_memory_seq_rm(memory, to, p0, p1);
    held_[to].remove(range);
  }
  llama_memory_seq_cp(memory, from, to, whole ? -1 : p0, whole ? -1 : p1);
  for (const auto& copied : part.ranges()) held_[to].add(copied);
  internals::apply_memory_updates(context_.get());
}

void Context::memory_keep(int32_t seq) {
  const Use use = hold();
  check_sequence(seq);
  own_memory();
  // The engine's own seq_keep leaves the streams of a cache that is not unified alone.
  for (int32_t other = 0; other < static_cast<int32_t>(options_.n_seq_max); ++other) {
    if (other != seq) drop(other);
  }
}

void Context::memory_shift(int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
  const Use use = hold();
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = own_memory();
  if (!llama_memory_can_shift(memory) || !internals::can_shift(context_.get())) {
    throw Unsupported("the memory of " + model_->arch() + " cannot move positions");
  }
  auto& held = held_[seq];
  const auto moved = held.within(range_of(p0, p1));
  if (moved.empty() || delta == 0) return;
  if (moved.first() + delta < 0 || moved.last() + delta >= model_->position_limit()) {
    throw InvalidInput("moving by " + std::to_string(delta) + " puts positions outside of 0.." +
                       std::to_string(model_->position_limit() - 1));
  }
  Positions after = held;
  for (const auto& range : moved.ranges()) after.remove(range);
  for (const auto& range : moved.ranges()) {
    const Positions::Range target{range.begin + delta, range.end + delta};
    if (after.overlaps(target)) {
      throw InvalidInput("moving by " + std::to_string(delta) + " puts tokens on positions " +
                         std::to_string(target.begin) + ".." + std::to_string(target.end - 1) +
                         ", of which others hold some; remove those first");
    }
  }
  for (const auto& range : moved.ranges()) after.add({range.begin + delta, range.end + delta});
  llama_memory_seq_add(memory, seq, p0, p1, delta);
  held = after;
  rewindable_[seq] = 0;
  // At once: an interrupted decode would leave the cache half moved.
  internals::apply_memory_updates(context_.get());
}

int32_t Context::memory_first(int32_t seq) const {
  const Use use = hold();
  check_sequence(seq);
  return llama_memory_seq_pos_min(engine_memory(), seq);
}

int32_t Context::memory_last(int32_t seq) const {
  const Use use = hold();
  check_sequence(seq);
  return llama_memory_seq_pos_max(engine_memory(), seq);
}

std::string Context::save(int32_t seq) const {
  const Use use = hold();
  check_sequence(seq);
  own_memory();
  std::string state(llama_state_seq_get_size(context_.get(), seq), '\0');
  const size_t written =
      llama_state_seq_get_data(context_.get(), reinterpret_cast<uint8_t*>(state.data()), state.size(), seq);
  if (written == 0) throw EngineFailed("the engine could not save sequence " + std::to_string(seq));
  state.resize(written);
  return state;
}

void Context::restore(int32_t seq, const std::string& state) {
  // The engine drops a sequence that it fails to restore; ours comes back.
  const bool held = memory_last(seq) >= 0;
  const std::string before = held ? save(seq) : std::string();
  const Use use = hold();
  auto* memory = own_memory();
  std::string reason;
  const auto load = [&](const std::string& bytes) {
    const LogScope log;
    try {
      const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
      if (guarded("the engine stopped", [&] {
            return llama_state_seq_set_data(context_.get(), data, bytes.size(), seq) == bytes.size();
          })) {
        return true;
      }
      reason = log.text();
    } catch (const EngineFailed& error) {
      reason = error.what();
    }
    return false;
  };
  const auto found = [&] {
    held_[seq] = {};
    // Recurrent layers hold what all tokens came to; the engine calls that the last position.
    const int32_t first = recurrent_ ? 0 : internals::first_position(context_.get(), seq);
    held_[seq].add({first, int64_t{llama_memory_seq_pos_max(memory, seq)} + 1});
    rewindable_[seq] = 0;
  };
  // The state of an empty sequence would leave what is there.
  if (held) llama_memory_seq_rm(memory, seq, -1, -1);
  if (load(state)) {
    found();
    return;
  }
  const std::string why = reason;
  llama_memory_seq_rm(memory, seq, -1, -1);
  if (held && !load(before)) llama_memory_seq_rm(memory, seq, -1, -1);
  found();
  throw InvalidInput("this state does not fit into this context: " + why);
}

}  // namespace llamatap
