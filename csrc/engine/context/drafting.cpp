// Context: methods for draft models (EAGLE-3, MTP and DFlash blocks).

#include <llama.h>

#include <algorithm>

#include "engine/context/context.hpp"
#include "engine/context/engine_batch.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/model/mtp_blocks.hpp"
#include "engine/private/draft_model.hpp"

namespace llamatap {

namespace {

// Maximum logits per encode: the engine reserves them for every row, though it computes none.
constexpr size_t kEncodeLogits = size_t{16} * 1024 * 1024;

}  // namespace

int32_t Context::state_width() const {
  return options_.mtp ? internals::draft_width(model_->handle()) : model_->n_embd();
}

bool Context::computes_all_rows() const {
  // EAGLE-3 and DFlash crop nothing, and most MTP blocks only the logits.
  return drafts() && !mtp_blocks(model_->arch()).crops_states;
}

void Context::check_drafting(const Batch& batch) const {
  const auto expect = [&](const std::string& what, int32_t width) {
    throw InvalidInput(
        model_->arch() + " takes " + what + " of width " + std::to_string(width) + ", not " +
        (batch.has_tokens() ? "tokens" : "embeddings") +
        (batch.has_embeddings() ? " with values of width " + std::to_string(batch.n_embd()) : ""));
  };
  if (model_->arch() == "dflash") {
    const int32_t width = internals::feature_width(model_->handle());
    const bool is_block = batch.has_tokens() && !batch.has_embeddings();
    const bool is_features = !batch.has_tokens() && batch.n_embd() == width;
    if (!is_block && !is_features) expect("tokens, or features", width);
    return;
  }
  const bool fits = batch.has_tokens() && batch.has_embeddings() && batch.n_embd() == state_width();
  if (!fits) expect("tokens with states", state_width());
}

void Context::select_head(int32_t head) { internals::select_mtp_block(context_.get(), head); }

void Context::encode(const float* features, int32_t n, float* states, const Poll& poll) {
  const ContextLock lock = hold();
  interruptible(n, poll, [&] { run_encode(features, n, states); });
}

void Context::run_encode(const float* features, int32_t n, float* states) {
  const auto n_features = static_cast<size_t>(internals::feature_width(model_->handle()));
  const auto width = static_cast<size_t>(model_->n_embd());
  const size_t fits = kEncodeLogits / static_cast<size_t>(model_->vocab().size());
  const auto longest = static_cast<int32_t>(std::min<size_t>(n_ubatch(), std::max<size_t>(fits, 16)));
  outputs_.clear();
  for (int32_t first = 0; first < n; first += longest) {
    const int32_t count = std::min(longest, n - first);
    // Encoding does not use positions, but the engine requires them to continue its memory.
    const int32_t next = llama_memory_seq_pos_max(llama_get_memory(context_.get()), 0) + 1;
    Batch batch(static_cast<int32_t>(n_features));
    Piece piece;
    for (int32_t i = 0; i < count; ++i) {
      batch.add_embedding(features + static_cast<size_t>(first + i) * n_features, next + i, {0}, true);
      piece.rows.push_back(i);
    }
    piece.output_rows = piece.rows;
    const EngineBatch engine_batch(batch, piece, /*n_positions=*/1);
    const bool nodes = !model_->on_gpu();
    watch({}, nodes);
    const LogScope log;
    const int32_t status = call_engine(engine_batch.view, /*encode=*/true, nodes);
    if (interrupted() || status == 2) throw Interrupted();
    if (status != 0) {
      throw EngineFailed("encode failed with status " + std::to_string(status) + ": " + log.text());
    }
    const float* values = internals::encoded_states(context_.get());
    std::copy(values, values + static_cast<size_t>(count) * width,
              states + static_cast<size_t>(first) * width);
  }
}

}  // namespace llamatap
