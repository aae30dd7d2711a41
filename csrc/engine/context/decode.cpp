// The part of Context that computes a batch, shows it to the observer, and takes it back when that fails.

#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "engine/abort.hpp"
#include "engine/context/context.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/private/cells.hpp"
#include "engine/private/draft_model.hpp"
#include "engine/private/engine_context.hpp"
#include "engine/private/ubatches.hpp"

namespace llamatap {

namespace {

// Below this, a decode is too short for a thread of its own to watch it.
constexpr int32_t kWatchedRows = 16;

/// The arrays behind a llama_batch of some entries of a Batch.
struct EngineBatch {
  std::vector<llama_token> tokens;
  std::vector<float> embeddings;
  std::vector<llama_pos> positions;
  std::vector<int32_t> n_sequences;
  std::vector<llama_seq_id*> sequences;
  std::vector<int8_t> flags;
  llama_batch view{};

  EngineBatch(const Batch& batch, const Piece& piece, int32_t n_positions) {
    const auto count = piece.rows.size();
    std::vector<bool> flagged(static_cast<size_t>(batch.size()), false);
    for (const int32_t row : piece.output_rows) flagged[row] = true;
    for (const int32_t row : piece.rows) {
      if (batch.has_embeddings()) {
        embeddings.insert(embeddings.end(), batch.embedding(row), batch.embedding(row) + batch.n_embd());
      }
      if (batch.has_tokens()) tokens.push_back(batch.tokens()[row]);
      positions.push_back(batch.positions()[row]);
      const auto& of_row = batch.sequences()[row];
      n_sequences.push_back(static_cast<int32_t>(of_row.size()));
      // The engine's interface is not const-correct; it only reads.
      sequences.push_back(const_cast<llama_seq_id*>(of_row.data()));
      flags.push_back(flagged[row] ? 1 : 0);
    }
    if (!batch.has_tokens() && n_positions > 1) {
      // M-RoPE takes sections of positions; text has the same in the first three and 0 in the last.
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
};

std::vector<int32_t> sequences_of(const Batch& batch) {
  std::set<int32_t> all;
  for (const auto& of_row : batch.sequences()) all.insert(of_row.begin(), of_row.end());
  return {all.begin(), all.end()};
}

}  // namespace

void Context::decode(const Batch& batch, DecodeObserver* observer, const Poll& poll) {
  const ContextLock lock = hold();
  compute(batch, observer, /*memory_is_scratch=*/false, poll);
}

void Context::decode_scratch(const Batch& batch, DecodeObserver& observer, const Poll& poll) {
  const ContextLock lock = hold();
  if (!is_empty()) {
    throw InvalidInput("the context holds tokens; extraction needs an empty one (memory.clear() empties it)");
  }
  struct Clear {
    Context& context;
    bool all_finite = false;
    ~Clear() {
      context.logit_rows_.clear();
      if (context.broken_ || !context.has_memory()) return;
      context.clear_memory(/*zero=*/!all_finite);
    }
  };
  Clear clear{*this};
  compute(batch, &observer, /*memory_is_scratch=*/true, poll);
  clear.all_finite = observer.all_finite();
}

void Context::compute(const Batch& batch, DecodeObserver* observer, bool memory_is_scratch,
                      const Poll& poll) {
  validate(batch);
  auto pieces = plan(batch, observer, memory_is_scratch);
  logit_rows_.assign(static_cast<size_t>(batch.size()), LogitRow{false, -1});
  kept_logits_.clear();
  kept_states_.clear();
  interruptible(batch.size(), poll, [&] { run(batch, pieces, observer); });
}

void Context::interruptible(int32_t n_rows, const Poll& poll, const std::function<void()>& work) {
  if (!poll || n_rows < kWatchedRows) {
    work();
    return;
  }
  run_polling(
      [&](std::atomic<bool>& stop) {
        interrupt_ = &stop;
        try {
          work();
        } catch (...) {
          interrupt_ = nullptr;
          throw;
        }
        interrupt_ = nullptr;
      },
      poll);
}

void Context::run(const Batch& batch, std::vector<Piece>& pieces, DecodeObserver* observer) {
  const auto sequences = sequences_of(batch);
  std::vector<int32_t> last;
  for (const int32_t seq : sequences) {
    last.push_back(has_memory() ? llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq) : -1);
  }
  nodes_seen_ = 0;
  const int64_t n_used = has_memory() ? Cells(context_.get()).used() : 0;
  try {
    for (auto& piece : pieces) {
      if (!run_piece(batch, piece, sequences.size() == 1, observer)) {
        throw ContextFull(full_message(batch, n_used));
      }
    }
  } catch (...) {
    observer_ = nullptr;
    logit_rows_.clear();
    if (!broken_) roll_back(sequences, last);
    throw;
  }
}

void Context::watch(const std::vector<int32_t>& hooked_layers, bool nodes) {
  const auto toggle = [&](const std::vector<int32_t>& layers, const std::vector<int32_t>& others, bool on) {
    for (const int32_t layer : layers) {
      if (std::find(others.begin(), others.end(), layer) == others.end()) {
        internals::hook_layer(context_.get(), layer, on);
      }
    }
  };
  toggle(hooked_layers_, hooked_layers, false);
  toggle(hooked_layers, hooked_layers_, true);
  hooked_layers_ = hooked_layers;
  internals::set_callback(context_.get(), nodes ? &Context::on_node : nullptr);
}

bool Context::run_piece(const Batch& batch, Piece& piece, bool one_sequence, DecodeObserver* observer) {
  const EngineBatch engine_batch(batch, piece, model_->n_positions());
  const auto given = piece.rows;
  const auto hooks = observer == nullptr ? std::vector<int32_t>() : observer->hooked_layers();
  // Without anyone to see them, the stops between nodes serve interruption alone; the CPU back end has its
  // own.
  const bool nodes = hooks.empty() && (observer != nullptr || !model_->on_gpu());
  watch(hooks, nodes);
  // Several sequences may be computed in another order than they are given in; the hooks put that right.
  std::vector<std::vector<int32_t>> ubatches;
  const bool order_matters = observer != nullptr && !drafts() && !one_sequence;
  if (has_memory() && (order_matters || options_.n_rs_seq > 0)) {
    ubatches = guarded("the engine cannot split this batch", [&] {
                 return internals::ubatches(context_.get(), engine_batch.view);
               }).value_or(ubatches);
  }
  if (!ubatches.empty() && hooks.empty()) {
    piece.rows.clear();
    piece.output_rows.clear();
    for (const auto& ubatch : ubatches) {
      for (const int32_t index : ubatch) {
        piece.rows.push_back(given[index]);
        if (engine_batch.flags[index] != 0) piece.output_rows.push_back(given[index]);
      }
    }
  }

  keep_logits();
  if (observer != nullptr) observer->begin(piece);
  observer_ = observer;
  observer_error_ = nullptr;
  stopped_ = false;
  const LogScope log;
  const int32_t status = call_engine(engine_batch.view, model_->is_encoder(), nodes);
  observer_ = nullptr;
  if (has_memory() && !borrows_memory()) note_written(status == 0);
  if (observer_error_) std::rethrow_exception(std::exchange(observer_error_, nullptr));
  if (interrupted() || status == 2) throw Interrupted();
  if (status == 1) return false;
  if (status == -1) throw InvalidInput("the engine refuses the batch: " + log.text());
  if (status != 0)
    throw EngineFailed("decode failed with status " + std::to_string(status) + ": " + log.text());
  note_rewindable(batch, given, ubatches);
  for (const int32_t layer : hooks) observer->hooked(layer, internals::hooked_rows(context_.get(), layer));
  if (observer != nullptr) observer->end();
  if (piece.may_stop) return true;
  has_logits_ = internals::computed_graph(context_.get()).has_logits();
  if (!has_logits_) return true;
  for (size_t index = 0; index < given.size(); ++index) {
    const int32_t row = given[index];
    if (batch.outputs()[row]) logit_rows_[row] = {true, static_cast<int32_t>(index)};
  }
  return true;
}

int32_t Context::call_engine(const llama_batch& batch, bool encode, bool nodes) {
  int32_t status = 0;
  const auto started = std::chrono::steady_clock::now();
  try {
    const auto compute = [&] {
      return encode ? llama_encode(context_.get(), batch) : llama_decode(context_.get(), batch);
    };
    // The first node that is seen ends the guard: without one, threads may be at work when it is needed.
    status = nodes ? guarded("decode", compute) : compute();
  } catch (...) {
    broken_ = true;
    throw;
  }
  // Also brings back errors of asynchronous back ends before anyone reads.
  llama_synchronize(context_.get());
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
  engine_seconds_.store(engine_seconds() + taken.count(), std::memory_order_relaxed);
  // Other graphs (moving positions in the cache) are not for the callback to see, nor to stop.
  internals::set_callback(context_.get(), nullptr);
  return status;
}

std::string Context::full_message(const Batch& batch, int64_t n_used) const {
  return "the context has room for " + std::to_string(n_ctx_seq()) + " tokens " +
         (options_.kv_unified ? "" : "a sequence ") + "(n_ctx); its sequences hold " +
         std::to_string(n_used) + " and the batch brings " + std::to_string(batch.size()) +
         "; remove sequences or make a larger context";
}

void Context::note_rewindable(const Batch& batch, const std::vector<int32_t>& given,
                              const std::vector<std::vector<int32_t>>& ubatches) {
  for (const auto& ubatch : ubatches) {
    std::vector<int32_t> rows(options_.n_seq_max, 0);
    for (const int32_t index : ubatch) {
      for (const int32_t seq : batch.sequences()[given[index]]) ++rows[seq];
    }
    for (size_t seq = 0; seq < rows.size(); ++seq) {
      if (rows[seq] > 0) rewindable_[seq] = std::min(rows[seq] - 1, static_cast<int32_t>(options_.n_rs_seq));
    }
  }
}

void Context::keep_logits() {
  const auto n_vocab = static_cast<size_t>(model_->vocab().size());
  for (auto& row : logit_rows_) {
    if (!row.in_engine) continue;
    const float* values = llama_get_logits_ith(context_.get(), row.index);
    if (drafts()) {
      const float* state = internals::next_state(context_.get(), row.index);
      kept_states_.insert(kept_states_.end(), state, state + state_width());
    }
    row = {false, static_cast<int32_t>(kept_logits_.size() / n_vocab)};
    kept_logits_.insert(kept_logits_.end(), values, values + n_vocab);
  }
}

void Context::copy_logits(int32_t row, float* target) const {
  const ContextLock lock = hold();
  const float* values = output_logits(row);
  std::copy(values, values + model_->vocab().size(), target);
}

const Context::LogitRow& Context::output_row(int32_t row) const {
  const auto n = static_cast<int32_t>(logit_rows_.size());
  if (n == 0) throw InvalidInput("there are no logits: nothing was decoded yet, or the last decode failed");
  if (!has_logits_) throw Unsupported(model_->arch() + " models have no output head, so there are no logits");
  if (row < 0) row += n;
  if (row < 0 || row >= n) {
    throw InvalidInput("row " + std::to_string(row) + " is not in the last batch of " + std::to_string(n));
  }
  const auto& found = logit_rows_[row];
  if (found.index < 0) {
    throw InvalidInput("row " + std::to_string(row) +
                       " of the last batch was not an output; add it with output=True");
  }
  return found;
}

const float* Context::output_logits(int32_t row) const {
  const auto& found = output_row(row);
  const auto n_vocab = static_cast<size_t>(model_->vocab().size());
  const float* values = found.in_engine ? llama_get_logits_ith(context_.get(), found.index)
                                        : kept_logits_.data() + static_cast<size_t>(found.index) * n_vocab;
  if (values == nullptr) throw EngineFailed("the engine has no logits for row " + std::to_string(row));
  return values;
}

void Context::roll_back(const std::vector<int32_t>& sequences, const std::vector<int32_t>& last) {
  if (!has_memory() || borrows_memory()) return;
  auto* memory = llama_get_memory(context_.get());
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (llama_memory_seq_pos_max(memory, sequences[i]) == last[i]) continue;
    const int32_t end = last[i] + 1;
    if (end == 0 || recurrent_ || !can_remove_suffix(sequences[i], end) ||
        !llama_memory_seq_rm(memory, sequences[i], end, -1)) {
      drop(sequences[i]);
    }
  }
}

bool Context::interrupted() const noexcept {
  return Activity::ending() || (interrupt_ != nullptr && interrupt_->load(std::memory_order_relaxed));
}

bool Context::can_stop() const noexcept {
  // Between back ends the scheduler reads the ids of the experts that a stopped split has not computed.
  return !model_->has_experts() || internals::n_splits(context_.get()) <= 1;
}

bool Context::on_node(ggml_tensor* node, bool ask, void* self) noexcept {
  auto* context = static_cast<Context*>(self);
  try {
    return context->see_node(node, ask);
  } catch (...) {
    context->observer_error_ = std::current_exception();
    context->observer_ = nullptr;
    context->stopped_ = context->can_stop();
    return ask ? context->stopped_ : !context->stopped_;
  }
}

bool Context::see_node(const ggml_tensor* node, bool ask) {
  if (ask) {
    nodes_seen_.store(nodes_seen() + 1, std::memory_order_relaxed);
    const Graph graph = internals::computed_graph(context_.get());
    if (node == graph.node(0)) {
      AbortGuard::suspend();
      stopped_ = observer_error_ != nullptr && can_stop();
      if (observer_ != nullptr) observer_->begin_graph(graph);
    }
  }
  if (interrupted() && can_stop()) stopped_ = true;
  // Returning false ends one backend split only; of those that follow, asking for the first node and
  // refusing to go on leaves no more than that one to be computed, on stale inputs.
  if (stopped_) return ask;
  if (observer_ == nullptr) return false;
  if (ask) return observer_->wants(node);
  stopped_ = !observer_->computed(node) && can_stop();
  return !stopped_;
}

}  // namespace llamatap
