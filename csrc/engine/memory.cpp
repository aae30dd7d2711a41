// The part of Context that looks after its memory: the KV cache, or the state of recurrent models.

#include <llama.h>

#include <algorithm>

#include "engine/context.hpp"
#include "engine/error.hpp"
#include "engine/internals.hpp"
#include "engine/log.hpp"
#include "engine/use.hpp"

namespace llamatap {

namespace {

void check_range(int32_t p0, int32_t p1) {
  if (p0 < -1 || p1 < -1 || (p0 >= 0 && p1 >= 0 && p0 > p1)) {
    throw InvalidInput("positions [" + std::to_string(p0) + ", " + std::to_string(p1) +
                       ") are no range; -1 stands for an open end");
  }
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
  const int32_t window = llama_model_n_swa(model_->handle());
  if (window == 0 || options_.swa_full || p0 <= 0) return true;
  return llama_memory_seq_pos_min(llama_get_memory(context_.get()), seq) <= std::max(0, p0 - window);
}

llama_memory_i* Context::engine_memory() const {
  if (!has_memory()) throw Unsupported("this model keeps no memory of past tokens");
  return llama_get_memory(context_.get());
}

void Context::memory_clear() {
  const Use use(mutex_, *model_);
  if (has_memory()) llama_memory_clear(llama_get_memory(context_.get()), /*data=*/false);
}

void Context::memory_remove(int32_t seq, int32_t p0, int32_t p1) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = engine_memory();
  if (llama_memory_seq_pos_max(memory, seq) < 0) return;
  if (p0 > 0 && p0 <= llama_memory_seq_pos_max(memory, seq) && !can_remove_suffix(seq, p0)) {
    throw Unsupported("the sliding-window layers of " + model_->arch() +
                      " no longer hold what comes before position " + std::to_string(p0) +
                      "; remove the whole sequence, or make the context with swa_full=True");
  }
  if (!llama_memory_seq_rm(memory, seq, p0, p1)) {
    throw Unsupported("the memory of " + model_->arch() +
                      " cannot give up a part of a sequence; remove the whole of it, save and restore it, or "
                      "make the context with n_rs_seq (then one removal of at most n_rs_seq tokens works "
                      "between two decodes)");
  }
}

void Context::memory_copy(int32_t from, int32_t to, int32_t p0, int32_t p1) {
  const Use use(mutex_, *model_);
  check_sequence(from);
  check_sequence(to);
  check_range(p0, p1);
  auto* memory = engine_memory();
  if (from == to) return;
  const bool whole = p0 <= 0 && (p1 < 0 || p1 > llama_memory_seq_pos_max(memory, from));
  if (!whole && (!options_.kv_unified || model_->is_recurrent() || model_->is_hybrid())) {
    throw Unsupported(
        "only a whole sequence can be copied in this context; a part needs kv_unified=True and a model "
        "without "
        "recurrent state");
  }
  llama_memory_seq_cp(memory, from, to, whole ? -1 : p0, whole ? -1 : p1);
  internals::apply_memory_updates(context_.get());
}

void Context::memory_keep(int32_t seq) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  // The engine's own seq_keep leaves the streams of a cache that is not unified alone.
  for (int32_t other = 0; other < static_cast<int32_t>(options_.n_seq_max); ++other) {
    if (other != seq) llama_memory_seq_rm(engine_memory(), other, -1, -1);
  }
}

void Context::memory_shift(int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = engine_memory();
  if (!llama_memory_can_shift(memory)) {
    throw Unsupported("the memory of " + model_->arch() + " cannot move positions");
  }
  const int32_t first = llama_memory_seq_pos_min(memory, seq);
  if (first < 0) return;
  const int64_t start = std::max(p0, first) + int64_t{delta};
  const int64_t end = llama_memory_seq_pos_max(memory, seq) + int64_t{delta};
  if (start < 0 || end >= model_->position_limit()) {
    throw InvalidInput("moving by " + std::to_string(delta) + " puts positions outside of 0.." +
                       std::to_string(model_->position_limit() - 1));
  }
  llama_memory_seq_add(memory, seq, p0, p1, delta);
  // At once: an interrupted decode would leave the cache half moved.
  internals::apply_memory_updates(context_.get());
}

int32_t Context::memory_first(int32_t seq) const {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  return llama_memory_seq_pos_min(engine_memory(), seq);
}

int32_t Context::memory_last(int32_t seq) const {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  return llama_memory_seq_pos_max(engine_memory(), seq);
}

std::string Context::save(int32_t seq) const {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  engine_memory();
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
  const Use use(mutex_, *model_);
  auto* memory = engine_memory();
  const auto load = [&](const std::string& bytes) {
    return llama_state_seq_set_data(context_.get(), reinterpret_cast<const uint8_t*>(bytes.data()),
                                    bytes.size(), seq) == bytes.size();
  };
  const LogScope log;
  if (load(state)) return;
  const std::string reason = log.text();
  llama_memory_seq_rm(memory, seq, -1, -1);
  if (held && !load(before)) llama_memory_seq_rm(memory, seq, -1, -1);
  throw InvalidInput("this state does not fit into this context: " + reason);
}

}  // namespace llamatap
