#include "engine/context/engine_batch.hpp"

namespace llamatap {

EngineBatch::EngineBatch(const Batch& batch, const Piece& piece, int32_t n_positions) {
  const auto count = piece.rows.size();
  std::vector<bool> flagged(static_cast<size_t>(batch.size()), false);
  for (const int32_t row : piece.output_rows) flagged[row] = true;
  if (batch.has_embeddings()) embeddings.reserve(count * static_cast<size_t>(batch.n_embd()));
  for (const int32_t row : piece.rows) {
    if (batch.has_embeddings()) {
      embeddings.insert(embeddings.end(), batch.embedding(row), batch.embedding(row) + batch.n_embd());
    }
    if (batch.has_tokens()) tokens.push_back(batch.tokens()[row]);
    positions.push_back(batch.positions()[row]);
    const auto& of_row = batch.sequences()[row];
    n_sequences.push_back(static_cast<int32_t>(of_row.size()));
    // The engine only reads it.
    sequences.push_back(const_cast<llama_seq_id*>(of_row.data()));
    flags.push_back(flagged[row] ? 1 : 0);
  }
  if (!batch.has_tokens() && n_positions > 1) {
    // M-RoPE has 4 sections of positions; for text, the first 3 are equal and the last is 0.
    const auto text = positions;
    for (int32_t section = 1; section < n_positions; ++section) {
      if (section == 3) {
        positions.insert(positions.end(), count, 0);
      } else {
        positions.insert(positions.end(), text.begin(), text.end());
      }
    }
  }
  view.n_tokens = static_cast<int32_t>(count);
  view.token = batch.has_tokens() ? tokens.data() : nullptr;
  view.embd = batch.has_embeddings() ? embeddings.data() : nullptr;
  view.pos = positions.data();
  view.n_seq_id = n_sequences.data();
  view.seq_id = sequences.data();
  view.logits = flags.data();
}

}  // namespace llamatap
