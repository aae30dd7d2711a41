#pragma once

#include <llama.h>

#include <cstdint>
#include <vector>

#include "engine/context/batch.hpp"
#include "engine/context/batch_plan.hpp"

namespace llamatap {

/// A llama_batch with the entries of a piece, and its arrays. Refers to the Batch.
struct EngineBatch {
  EngineBatch(const Batch& batch, const Piece& piece, int32_t n_positions);
  EngineBatch(const EngineBatch&) = delete;
  EngineBatch& operator=(const EngineBatch&) = delete;

  std::vector<llama_token> tokens;
  std::vector<float> embeddings;
  std::vector<llama_pos> positions;
  std::vector<int32_t> n_sequences;
  std::vector<llama_seq_id*> sequences;
  std::vector<int8_t> flags;
  llama_batch view{};
};

}  // namespace llamatap
