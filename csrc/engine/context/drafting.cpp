// The part of Context for models that draft for another: EAGLE-3, MTP and DFlash blocks.

#include <llama.h>

#include <algorithm>

#include "engine/context/context.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/model/mtp_blocks.hpp"
#include "engine/private/draft_model.hpp"

namespace llamatap {

namespace {

// The engine makes room for the logits of every row that it encodes, though it computes none.
constexpr size_t kEncodeLogits = size_t{16} << 20;

}  // namespace

int32_t Context::state_width() const {
  return options_.mtp ? internals::draft_width(model_->handle()) : model_->n_embd();
}

bool Context::computes_all_rows() const {
  // EAGLE-3 and DFlash crop nothing, and most MTP blocks their logits alone.
  return drafts() && !draft_blocks(model_->arch()).crops_states;
}

bool Context::borrows_memory() const { return options_.mtp && draft_blocks(model_->arch()).borrows_memory; }

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

const float* Context::next_state(int32_t row) const {
  const auto& found = output_row(row);
  const auto width = static_cast<size_t>(state_width());
  const float* values = found.in_engine ? internals::next_state(context_.get(), found.index)
                                        : kept_states_.data() + static_cast<size_t>(found.index) * width;
  if (values == nullptr) throw EngineFailed("the engine has no state for row " + std::to_string(row));
  return values;
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
  logit_rows_.clear();
  for (int32_t first = 0; first < n; first += longest) {
    const int32_t count = std::min(longest, n - first);
    // Positions play no part in it, but the engine wants them to go on from what it remembers.
    const int32_t next = llama_memory_seq_pos_max(llama_get_memory(context_.get()), 0) + 1;
    std::vector<llama_pos> positions(static_cast<size_t>(count));
    std::vector<int32_t> n_sequences(static_cast<size_t>(count), 1);
    llama_seq_id zero = 0;
    std::vector<llama_seq_id*> sequences(static_cast<size_t>(count), &zero);
    std::vector<int8_t> flags(static_cast<size_t>(count), 1);
    for (int32_t i = 0; i < count; ++i) positions[i] = next + i;
    llama_batch batch{};
    batch.n_tokens = count;
    // The engine's interface is not const-correct; it only reads.
    batch.embd = const_cast<float*>(features + static_cast<size_t>(first) * n_features);
    batch.pos = positions.data();
    batch.n_seq_id = n_sequences.data();
    batch.seq_id = sequences.data();
    batch.logits = flags.data();
    const bool nodes = !model_->on_gpu();
    watch({}, nodes);
    const LogScope log;
    const int32_t status = call_engine(batch, /*encode=*/true, nodes);
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
