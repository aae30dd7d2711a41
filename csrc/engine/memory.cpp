// The part of Context that looks after its memory: the KV cache, or the state of recurrent models.

#include <llama.h>

#include "engine/context.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/use.hpp"

namespace llamatap {

namespace {

llama_memory_t memory_of(llama_context* context) {
  llama_memory_t memory = llama_get_memory(context);
  if (memory == nullptr) throw Unsupported("this model keeps no memory of past tokens");
  return memory;
}

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

void Context::memory_clear() {
  const Use use(mutex_, *model_);
  if (has_memory()) llama_memory_clear(llama_get_memory(context_.get()), /*data=*/false);
}

void Context::memory_remove(int32_t seq, int32_t p0, int32_t p1) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = memory_of(context_.get());
  if (llama_memory_seq_pos_max(memory, seq) < 0) return;
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
  auto* memory = memory_of(context_.get());
  if (from == to) return;
  const bool whole = p0 <= 0 && (p1 < 0 || p1 > llama_memory_seq_pos_max(memory, from));
  if (!whole && (!options_.kv_unified || model_->is_recurrent() || model_->is_hybrid())) {
    throw Unsupported(
        "only a whole sequence can be copied in this context; a part needs kv_unified=True and a model "
        "without "
        "recurrent state");
  }
  llama_memory_seq_cp(memory, from, to, whole ? -1 : p0, whole ? -1 : p1);
}

void Context::memory_keep(int32_t seq) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  llama_memory_seq_keep(memory_of(context_.get()), seq);
}

void Context::memory_shift(int32_t seq, int32_t p0, int32_t p1, int32_t delta) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  check_range(p0, p1);
  auto* memory = memory_of(context_.get());
  if (!llama_memory_can_shift(memory)) {
    throw Unsupported("the memory of " + model_->arch() + " cannot move positions");
  }
  const int32_t first = llama_memory_seq_pos_min(memory, seq);
  const int32_t start = p0 > first ? p0 : first;
  if (first >= 0 && int64_t{start} + delta < 0) {
    throw InvalidInput("moving position " + std::to_string(start) + " by " + std::to_string(delta) +
                       " makes it negative");
  }
  llama_memory_seq_add(memory, seq, p0, p1, delta);
}

int32_t Context::memory_first(int32_t seq) const {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  return llama_memory_seq_pos_min(memory_of(context_.get()), seq);
}

int32_t Context::memory_last(int32_t seq) const {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  return llama_memory_seq_pos_max(memory_of(context_.get()), seq);
}

bool Context::memory_empty() const {
  const Use use(mutex_, *model_);
  if (!has_memory()) return true;
  for (int32_t seq = 0; seq < static_cast<int32_t>(options_.n_seq_max); ++seq) {
    if (llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq) >= 0) return false;
  }
  return true;
}

std::string Context::save(int32_t seq) const {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  memory_of(context_.get());
  std::string state(llama_state_seq_get_size(context_.get(), seq), '\0');
  const size_t written =
      llama_state_seq_get_data(context_.get(), reinterpret_cast<uint8_t*>(state.data()), state.size(), seq);
  if (written == 0) throw EngineFailed("the engine could not save sequence " + std::to_string(seq));
  state.resize(written);
  return state;
}

void Context::restore(int32_t seq, const std::string& state) {
  const Use use(mutex_, *model_);
  check_sequence(seq);
  auto* memory = memory_of(context_.get());
  const LogScope log;
  const size_t read = llama_state_seq_set_data(context_.get(), reinterpret_cast<const uint8_t*>(state.data()),
                                               state.size(), seq);
  if (read != state.size()) {
    llama_memory_seq_rm(memory, seq, -1, -1);
    throw InvalidInput("this state does not fit this context; sequence " + std::to_string(seq) +
                       " is empty now: " + log.text());
  }
}

}  // namespace llamatap
