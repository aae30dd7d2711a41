#pragma once

#include <llama-cpp.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/backend.hpp"
#include "engine/context/batch.hpp"
#include "engine/context/context_lock.hpp"
#include "engine/context/context_options.hpp"
#include "engine/context/decode_observer.hpp"
#include "engine/context/graph.hpp"
#include "engine/context/kv_memory.hpp"
#include "engine/context/outputs.hpp"
#include "engine/error.hpp"
#include "engine/model/model.hpp"
#include "engine/polling.hpp"
#include "engine/private/engine_context.hpp"
#include "engine/private/graph_copies.hpp"

namespace llamatap {

/// The memory of a context, which stays locked while this lives.
struct LockedMemory {
  ContextLock lock;
  KvMemory& memory;

  KvMemory* operator->() const { return &memory; }
};

/// Decodes batches with a model and keeps its memory. One thread at a time: a second one gets Busy.
class Context {
 public:
  Context(std::shared_ptr<Model> model, const ContextOptions& options);
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  /// Locks the context, as every method does; a caller that reads results in place must do so, too. Throws
  /// Busy, and EngineFailed after an earlier call failed inside the engine.
  ContextLock hold() const;

  /// The memory, for changes and look-ups. Throws as hold() does.
  LockedMemory memory() { return {hold(), memory_}; }

  const std::shared_ptr<Model>& model() const { return model_; }
  const ContextOptions& options() const { return options_; }
  uint32_t n_ctx() const;
  /// Maximum number of tokens of one sequence.
  uint32_t n_ctx_seq() const;
  uint32_t n_batch() const;
  uint32_t n_ubatch() const;
  bool flash_attention() const;
  bool causal() const;
  /// Whether a batch must be computed at once: no memory, or attention that is not causal.
  bool at_once() const { return !has_memory() || !causal(); }
  /// Whether past tokens are kept.
  bool has_memory() const { return memory_.exists(); }

  /// Computes the batch, in one or more engine calls. On error the memory is rolled back; a sequence is
  /// removed completely when a part cannot be (recurrent models, sliding windows without swa_full).
  void decode(const Batch& batch, DecodeObserver* observer, const Poll& poll);

  /// Like decode(), but on an empty memory that is cleared afterwards, also on error: the observer may stop
  /// early anywhere, and there are no logits. Throws InvalidInput when the memory is not empty.
  void decode_scratch(const Batch& batch, DecodeObserver& observer, const Poll& poll);

  /// Copies the n_vocab logits of an entry of the last batch (negative: from the end). Throws InvalidInput
  /// when it was not an output.
  void copy_logits(int32_t row, float* target) const;

  /// These logits in place, valid until the next call of this context.
  const float* output_logits(int32_t row) const { return outputs_.logits(row); }

  // For draft contexts.
  bool drafts() const { return options_.target != nullptr; }
  /// Whether the draft attends to the target's memory; then only the target may change it.
  bool borrows_memory() const { return memory_.is_borrowed(); }
  /// Width of a pair's state, and of next_state().
  int32_t state_width() const;
  /// The draft's state at an output of the last batch: state_width() values, valid until the next call.
  const float* next_state(int32_t row) const { return outputs_.state(row); }
  /// Fuses features of the target, [n, n_features], into states, [n, state_width()].
  void encode(const float* features, int32_t n, float* states, const Poll& poll);
  /// Selects the MTP block that the next decodes compute.
  void select_head(int32_t head);

  /// Total seconds spent in engine calls.
  double engine_seconds() const { return engine_seconds_.load(std::memory_order_relaxed); }

  /// Number of graph nodes that the last decode computed; fewer after an early stop.
  int64_t nodes_seen() const { return nodes_seen_.load(std::memory_order_relaxed); }

  /// How many cells of the cache were set to zero so far.
  int64_t zeroed_cells() const { return memory_.zeroed_cells(); }

  /// Whether no sequence has tokens in memory. The caller must hold the context.
  bool is_empty() const { return memory_.is_empty(); }

  /// Builds the graph of a ubatch without computing it.
  Graph reserve_graph(uint32_t n_tokens, uint32_t n_outputs);

 private:
  /// Runs `work`. If it is long, `poll` can stop it: then throws Interrupted.
  void interruptible(int32_t n_rows, const Poll& poll, const std::function<void()>& work);
  /// Whether the engine computes all rows of a batch, outputs or not. It then reads the first ones.
  bool computes_all_rows() const;
  void run_encode(const float* features, int32_t n, float* states);
  void compute(const Batch& batch, DecodeObserver* observer, bool memory_is_scratch, const Poll& poll);
  void check_values(const Batch& batch) const;
  void check_drafting(const Batch& batch) const;
  BatchRules batch_rules() const;
  void run(const Batch& batch, std::vector<Piece>& pieces, DecodeObserver* observer);
  /// False when the batch does not fit.
  bool run_piece(const Batch& batch, Piece& piece, bool one_sequence, DecodeObserver* observer);
  /// Calls llama_encode or llama_decode; `guard`: aborts of the engine become exceptions until its first
  /// graph is built. Returns the engine's status.
  int32_t call_engine(const llama_batch& batch, bool encode, bool guard);
  std::string full_message(const Batch& batch, int64_t n_used) const;
  bool interrupted() const noexcept;
  bool can_stop() const noexcept;
  /// Sets up the next engine call: hooks for these layers, or the graph callback.
  void watch(const std::vector<int32_t>& hooked_layers, bool nodes);
  static bool on_node(ggml_tensor* node, bool ask, void* self) noexcept;
  bool visit_node(const ggml_tensor* node, bool ask);

  std::shared_ptr<Model> model_;
  ContextOptions options_;
  KvMemory memory_;
  Outputs outputs_;
  Threadpool threadpool_;
  llama_context_ptr context_;
  mutable std::mutex mutex_;
  std::atomic<bool> broken_{false};  // an exception left the engine during a decode
  DecodeObserver* observer_ = nullptr;
  std::exception_ptr observer_error_;
  bool stopped_ = false;  // the rest of the graph is not needed
  internals::HiddenLogits hidden_logits_;
  internals::GraphCopies copies_;
  std::atomic<bool>* interrupt_ = nullptr;
  std::vector<int32_t> hooked_layers_;
  // Written by the thread that uses the context, read by any thread.
  std::atomic<int64_t> nodes_seen_{0};
  std::atomic<double> engine_seconds_{0};
};

}  // namespace llamatap
