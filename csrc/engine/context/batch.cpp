#include "engine/context/batch.hpp"

#include "engine/error.hpp"

namespace llamatap {

void Batch::add_entry(int32_t position, const std::vector<int32_t>& sequences, bool output) {
  positions_.push_back(position);
  sequences_.push_back(sequences);
  outputs_.push_back(output);
}

void Batch::add(int32_t token, int32_t position, const std::vector<int32_t>& sequences, bool output) {
  if (has_embeddings()) throw InvalidInput("this batch holds embeddings; tokens cannot be added to it");
  add_entry(position, sequences, output);
  tokens_.push_back(token);
}

void Batch::add_embedding(const float* values, int32_t position, const std::vector<int32_t>& sequences,
                          bool output) {
  if (has_tokens()) throw InvalidInput("this batch holds tokens; embeddings cannot be added to it");
  add_entry(position, sequences, output);
  embeddings_.insert(embeddings_.end(), values, values + n_embd_);
}

void Batch::add_pair(int32_t token, const float* state, int32_t position,
                     const std::vector<int32_t>& sequences, bool output) {
  if (!has_tokens() || !has_embeddings()) throw InvalidInput("this batch does not hold tokens with states");
  add_entry(position, sequences, output);
  tokens_.push_back(token);
  embeddings_.insert(embeddings_.end(), state, state + n_embd_);
}

void Batch::clear() {
  tokens_.clear();
  embeddings_.clear();
  positions_.clear();
  sequences_.clear();
  outputs_.clear();
}

}  // namespace llamatap
