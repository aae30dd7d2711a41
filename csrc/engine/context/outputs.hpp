#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "engine/model/model.hpp"

struct llama_context;

namespace llamatap {

/// Logits (and states, in draft contexts) of the outputs of the last batch: in the engine's buffers for its
/// last call, copied for earlier calls.
class Outputs {
 public:
  /// Keeps a reference to the model. `n_state`: width of the states; 0: none.
  Outputs(const Model& model, size_t n_state) : model_(model), n_state_(n_state) {}
  void attach(llama_context* context) { context_ = context; }

  /// Begins a batch of `n_entries`.
  void begin(size_t n_entries);
  /// Forgets the last batch.
  void clear() { rows_.clear(); }
  /// Copies the results that the next engine call overwrites.
  void keep();
  /// Records whether the last graph had an output head.
  void set_head(bool has_head) { has_head_ = has_head; }
  /// Records that the output of entry `row` is the engine's number `index` of its last call.
  void set(int32_t row, int32_t index) { rows_[row] = {true, index}; }

  /// The n_vocab logits of an entry (negative: from the end), valid until the next call for the context.
  /// Throws InvalidInput when it was not an output.
  const float* logits(int32_t row) const;
  /// The state of an entry, like logits().
  const float* state(int32_t row) const;

 private:
  struct Row {
    bool in_engine = false;
    int32_t index = -1;  // in the last engine call, or of the copy; -1: no output
  };
  const Row& at(int32_t row) const;

  const Model& model_;
  size_t n_state_;
  llama_context* context_ = nullptr;
  bool has_head_ = true;
  std::vector<Row> rows_;  // by entry of the last batch
  std::vector<float> kept_logits_;
  std::vector<float> kept_states_;
};

}  // namespace llamatap
