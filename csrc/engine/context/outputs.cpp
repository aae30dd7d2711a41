#include "engine/context/outputs.hpp"

#include <llama.h>

#include <string>

#include "engine/error.hpp"
#include "engine/private/draft_model.hpp"

namespace llamatap {

void Outputs::begin(size_t n_entries) {
  rows_.assign(n_entries, Row());
  kept_logits_.clear();
  kept_states_.clear();
}

void Outputs::keep() {
  const auto n_vocab = static_cast<size_t>(model_.vocab().size());
  for (auto& row : rows_) {
    if (!row.in_engine) continue;
    const float* values = llama_get_logits_ith(context_, row.index);
    if (n_state_ > 0) {
      const float* state = internals::next_state(context_, row.index);
      kept_states_.insert(kept_states_.end(), state, state + n_state_);
    }
    row = {false, static_cast<int32_t>(kept_logits_.size() / n_vocab)};
    kept_logits_.insert(kept_logits_.end(), values, values + n_vocab);
  }
}

const Outputs::Row& Outputs::at(int32_t row) const {
  const auto n = static_cast<int32_t>(rows_.size());
  if (n == 0) throw InvalidInput("there are no logits: nothing was decoded yet, or the last decode failed");
  if (!has_head_) throw Unsupported(model_.arch() + " models have no output head, so there are no logits");
  if (row < 0) row += n;
  if (row < 0 || row >= n) {
    throw InvalidInput("row " + std::to_string(row) + " is not in the last batch of " + std::to_string(n));
  }
  const auto& found = rows_[row];
  if (found.index < 0) {
    throw InvalidInput("row " + std::to_string(row) +
                       " of the last batch was not an output; add it with output=True");
  }
  return found;
}

const float* Outputs::logits(int32_t row) const {
  const auto& found = at(row);
  const auto n_vocab = static_cast<size_t>(model_.vocab().size());
  const float* values = found.in_engine ? llama_get_logits_ith(context_, found.index)
                                        : kept_logits_.data() + static_cast<size_t>(found.index) * n_vocab;
  if (values == nullptr) throw EngineFailed("the engine has no logits for row " + std::to_string(row));
  return values;
}

const float* Outputs::state(int32_t row) const {
  const auto& found = at(row);
  const float* values = found.in_engine ? internals::next_state(context_, found.index)
                                        : kept_states_.data() + static_cast<size_t>(found.index) * n_state_;
  if (values == nullptr) throw EngineFailed("the engine has no state for row " + std::to_string(row));
  return values;
}

}  // namespace llamatap
