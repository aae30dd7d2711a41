// Context: decodes a batch, calls the observer, and undoes failed decodes.

#include <ggml.h>
#include <llama.h>

#include <algorithm>
#include <chrono>
#include <set>
#include <utility>

#include "engine/abort.hpp"
#include "engine/context/batch_check.hpp"
#include "engine/context/context.hpp"
#include "engine/context/engine_batch.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/private/engine_context.hpp"
#include "engine/private/ubatches.hpp"

namespace llamatap {

namespace {

// Shorter decodes run on the calling thread, without polling.
constexpr int32_t kWatchedRows = 16;

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
      context.outputs_.clear();
      if (context.broken_ || !context.has_memory()) return;
      context.memory_.empty(/*zero=*/!all_finite);
    }
  };
  Clear clear{*this};
  compute(batch, &observer, /*memory_is_scratch=*/true, poll);
  clear.all_finite = observer.all_finite();
}

void Context::check_values(const Batch& batch) const {
  if (batch.size() == 0) return;
  if (drafts()) {
    check_drafting(batch);
  } else if (batch.has_embeddings()) {
    if (batch.has_tokens()) throw InvalidInput("only a draft context takes states beside tokens");
    if (!model_->takes_embeddings()) {
      throw Unsupported("the engine computes " + model_->arch() + " from tokens only, not from embeddings");
    }
    if (batch.n_embd() != model_->n_embd_input()) {
      throw InvalidInput("embeddings must be " + std::to_string(model_->n_embd_input()) + " wide, not " +
                         std::to_string(batch.n_embd()));
    }
  }
}

BatchRules Context::batch_rules() const {
  BatchRules rules;
  rules.n_vocab = model_->vocab().size();
  rules.position_limit = model_->position_limit();
  rules.n_positions = model_->n_positions();
  rules.n_swa = model_->n_swa();
  rules.n_seq_max = options_.n_seq_max;
  rules.n_batch = n_batch();
  rules.n_ubatch = n_ubatch();
  rules.n_outputs_max = options_.n_outputs_max;
  rules.has_memory = has_memory();
  rules.at_once = at_once();
  rules.kv_unified = options_.kv_unified;
  rules.shares_entries = options_.kv_unified && (!model_->is_recurrent() || model_->is_hybrid());
  rules.computes_all_rows = computes_all_rows();
  return rules;
}

void Context::compute(const Batch& batch, DecodeObserver* observer, bool memory_is_scratch,
                      const Poll& poll) {
  check_values(batch);
  const auto rules = batch_rules();
  check_batch(batch, rules, [&](int32_t seq) { return memory_.last_or_none(seq); });
  PlanWishes wishes;
  if (observer != nullptr) {
    wishes.scratch = memory_is_scratch;
    wishes.may_stop = memory_is_scratch || observer->stop_keeps_memory();
    wishes.needs_last_block.resize(static_cast<size_t>(batch.size()));
    for (int32_t row = 0; row < batch.size(); ++row) {
      wishes.needs_last_block[row] = observer->needs_last_block(row);
    }
  }
  auto pieces = plan_batch(batch, rules, wishes);
  outputs_.begin(static_cast<size_t>(batch.size()));
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
  std::vector<int32_t> last(sequences.size());
  std::transform(sequences.begin(), sequences.end(), last.begin(),
                 [&](int32_t seq) { return memory_.last_or_none(seq); });
  nodes_seen_ = 0;
  const int64_t n_used = memory_.used_cells();
  try {
    for (auto& piece : pieces) {
      if (!run_piece(batch, piece, sequences.size() == 1, observer)) {
        throw ContextFull(full_message(batch, n_used));
      }
    }
  } catch (...) {
    observer_ = nullptr;
    outputs_.clear();
    if (!broken_) memory_.undo_failed_decode(sequences, last);
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
  // Without an observer, stops between nodes only serve interruption; on a GPU they cost too much.
  auto wishes = observer == nullptr ? internals::CopyWishes() : observer->copies();
  const bool copies = wishes.any();
  const bool nodes = hooks.empty() && !copies && (observer != nullptr || !model_->on_gpu());
  watch(hooks, nodes);
  copies_.watch(context_.get(), std::move(wishes), piece.may_stop);
  // The engine may reorder several sequences; the hooks restore the order.
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

  outputs_.keep();
  if (observer != nullptr) observer->begin(piece);
  observer_ = observer;
  observer_error_ = nullptr;
  stopped_ = false;
  const LogScope log;
  const int32_t status =
      call_engine(engine_batch.view, model_->is_encoder(), nodes || (copies && piece.may_stop));
  observer_ = nullptr;
  if (has_memory() && !borrows_memory()) memory_.note_written(status == 0);
  nodes_seen_.store(nodes_seen() + copies_.nodes(), std::memory_order_relaxed);
  copies_.rethrow();
  if (observer_error_) std::rethrow_exception(std::exchange(observer_error_, nullptr));
  if (interrupted() || status == 2) throw Interrupted();
  if (status == 1) return false;
  if (status == -1) throw InvalidInput("the engine refuses the batch: " + log.text());
  if (status != 0)
    throw EngineFailed("decode failed with status " + std::to_string(status) + ": " + log.text());
  memory_.note_rewindable(batch, given, ubatches);
  for (const int32_t layer : hooks) observer->hooked(layer, internals::hooked_rows(context_.get(), layer));
  if (observer != nullptr) observer->end();
  if (piece.may_stop) return true;
  const bool has_head = internals::computed_graph(context_.get()).has_logits();
  outputs_.set_head(has_head);
  if (!has_head) return true;
  for (size_t index = 0; index < given.size(); ++index) {
    if (batch.outputs()[given[index]]) outputs_.set(given[index], static_cast<int32_t>(index));
  }
  return true;
}

int32_t Context::call_engine(const llama_batch& batch, bool encode, bool guard) {
  int32_t status = 0;
  const auto started = std::chrono::steady_clock::now();
  try {
    const auto compute = [&] {
      return encode ? llama_encode(context_.get(), batch) : llama_decode(context_.get(), batch);
    };
    // The first node, or a graph that was built, ends the guard. Else nothing would, while other threads
    // compute: no guard.
    status = guard ? guarded("decode", compute) : compute();
  } catch (...) {
    broken_ = true;
    throw;
  }
  internals::show_logits(hidden_logits_);
  // Reports errors of asynchronous back ends before results are read.
  llama_synchronize(context_.get());
  const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - started;
  engine_seconds_.store(engine_seconds() + taken.count(), std::memory_order_relaxed);
  // The callback must not see or stop other graphs (moving positions in the cache).
  internals::set_callback(context_.get(), nullptr);
  return status;
}

std::string Context::full_message(const Batch& batch, int64_t n_used) const {
  return "the context has room for " + std::to_string(n_ctx_seq()) + " tokens " +
         (options_.kv_unified ? "" : "a sequence ") + "(n_ctx); its sequences hold " +
         std::to_string(n_used) + " and the batch brings " + std::to_string(batch.size()) +
         "; remove sequences or make a larger context";
}

bool Context::interrupted() const noexcept {
  return Activity::ending() || (interrupt_ != nullptr && interrupt_->load(std::memory_order_relaxed));
}

bool Context::can_stop() const noexcept {
  // With experts, the scheduler reads expert ids between splits, which a stopped split has not computed.
  return !model_->has_experts() || internals::n_splits(context_.get()) <= 1;
}

bool Context::on_node(ggml_tensor* node, bool ask, void* self) noexcept {
  auto* context = static_cast<Context*>(self);
  try {
    return context->visit_node(node, ask);
  } catch (...) {
    context->observer_error_ = std::current_exception();
    context->observer_ = nullptr;
    context->stopped_ = context->can_stop();
    return ask ? context->stopped_ : !context->stopped_;
  }
}

bool Context::visit_node(const ggml_tensor* node, bool ask) {
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
  // Returning false ends only one backend split. In each following split, ask for the first node and stop
  // after it: only that node is computed, on stale inputs.
  if (stopped_) return ask;
  if (observer_ == nullptr) return false;
  if (ask) return observer_->wants(node);
  stopped_ = !observer_->computed(node) && can_stop();
  if (stopped_) internals::hide_logits(context_.get(), hidden_logits_);
  return !stopped_;
}

}  // namespace llamatap
