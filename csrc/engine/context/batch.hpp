#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace llamatap {

/// Input of one decode: entries of (token, embedding or pair; position; sequences; output flag). A pair is a
/// token and a state. All entries of a batch are of the same kind. Result rows are in the order of the
/// entries.
class Batch {
 public:
  /// `n_embd` is the width of embedding entries; 0 for a batch of tokens.
  explicit Batch(int32_t n_embd = 0) : n_embd_(n_embd), has_tokens_(n_embd == 0) {}

  /// A batch of pairs with states of this width, for EAGLE-3 and MTP blocks.
  static Batch of_pairs(int32_t n_state) {
    Batch batch(n_state);
    batch.has_tokens_ = true;
    return batch;
  }

  void add(int32_t token, int32_t position, const std::vector<int32_t>& sequences, bool output);
  void add_embedding(const float* values, int32_t position, const std::vector<int32_t>& sequences,
                     bool output);
  void add_pair(int32_t token, const float* state, int32_t position, const std::vector<int32_t>& sequences,
                bool output);
  void clear();

  int32_t size() const { return static_cast<int32_t>(positions_.size()); }
  int32_t n_embd() const { return n_embd_; }
  bool has_tokens() const { return has_tokens_; }
  /// Whether entries carry values: embeddings in place of tokens, or states beside them.
  bool has_embeddings() const { return n_embd_ > 0; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  const float* embedding(int32_t row) const {
    return embeddings_.data() + static_cast<size_t>(row) * static_cast<size_t>(n_embd_);
  }
  const std::vector<int32_t>& positions() const { return positions_; }
  const std::vector<std::vector<int32_t>>& sequences() const { return sequences_; }
  const std::vector<bool>& outputs() const { return outputs_; }

 private:
  void add_entry(int32_t position, const std::vector<int32_t>& sequences, bool output);

  int32_t n_embd_;
  bool has_tokens_;
  std::vector<int32_t> tokens_;
  std::vector<float> embeddings_;
  std::vector<int32_t> positions_;
  std::vector<std::vector<int32_t>> sequences_;
  std::vector<bool> outputs_;
};

}  // namespace llamatap
