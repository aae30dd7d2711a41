#include "engine/context.hpp"

#include <ggml.h>
#include <llama.h>
#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <set>
#include <utility>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/internals.hpp"
#include "engine/log.hpp"

namespace llamatap {

namespace {

// Below this, a decode is too short for a thread of its own to watch it.
constexpr int32_t kWatchedRows = 16;

// What the engine notes of each place in a cache, whatever the model: position, sequences and the like.
constexpr uint64_t kCellBytes = 48;

uint64_t machine_memory() {
  return static_cast<uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(sysconf(_SC_PAGE_SIZE));
}

ggml_type cache_type(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                               GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1}) {
    if (name == ggml_type_name(type)) return type;
  }
  throw InvalidInput("unknown KV cache type '" + name +
                     "'; known are f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1");
}

/// Whether the engine's own rollback of recurrent state gives the states of a context that never went ahead.
bool rolls_back(const std::string& arch) { return arch == "qwen35" || arch == "qwen35moe"; }

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
      } else {
        tokens.push_back(batch.tokens()[row]);
      }
      positions.push_back(batch.positions()[row]);
      const auto& of_row = batch.sequences()[row];
      n_sequences.push_back(static_cast<int32_t>(of_row.size()));
      // The engine's interface is not const-correct; it only reads.
      sequences.push_back(const_cast<llama_seq_id*>(of_row.data()));
      flags.push_back(flagged[row] ? 1 : 0);
    }
    if (batch.has_embeddings() && n_positions > 1) {
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
    view.token = batch.has_embeddings() ? nullptr : tokens.data();
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

void Context::Free::operator()(llama_context* context) const { llama_free(context); }

Context::Context(std::shared_ptr<Model> model, const ContextOptions& options)
    : model_(std::move(model)), options_(options), threadpool_(nullptr, nullptr) {
  if (model_->options().vocab_only) throw Unsupported("the model was loaded without its weights");
  if (model_->process() != static_cast<int32_t>(getpid())) {
    throw Unsupported("the model was loaded before a fork; load it in this process");
  }
  if (const auto reason = model_->refusal(); !reason.empty()) {
    throw Unsupported(model_->arch() + ": " + reason);
  }
  const auto require = [](bool good, const std::string& message) {
    if (!good) throw InvalidInput(message);
  };
  require(options.n_batch > 0, "n_batch must be at least 1");
  require(options.n_ubatch > 0, "n_ubatch must be at least 1");
  const auto most = llama_max_parallel_sequences();
  require(options.n_seq_max > 0 && options.n_seq_max <= most,
          "n_seq_max must be in 1.." + std::to_string(most) + ", not " + std::to_string(options.n_seq_max));
  require(options.n_outputs_max == 0 || options.n_outputs_max >= options.n_seq_max,
          "n_outputs_max must be 0 or at least n_seq_max (" + std::to_string(options.n_seq_max) + "), not " +
              std::to_string(options.n_outputs_max));
  require(options.n_threads > 0 && options.n_threads <= 512,
          "n_threads must be in 1..512, not " + std::to_string(options.n_threads));
  require(options.flash_attention >= -1 && options.flash_attention <= 1,
          "flash_attn must be auto, on or off");

  // The engine makes room for an output of each sequence in every call.
  options_.n_batch = std::max(options.n_batch, options.n_seq_max);
  const uint32_t n_ctx_train = static_cast<uint32_t>(model_->n_ctx_train());
  options_.n_ctx = std::max(options.n_ctx == 0 ? n_ctx_train : options.n_ctx, options.n_seq_max);
  if (!model_->is_recurrent() && options_.n_ctx * kCellBytes > machine_memory()) {
    throw Unsupported("n_ctx=" + std::to_string(options_.n_ctx) + " needs more memory than the " +
                      std::to_string(machine_memory() >> 30) + " GiB of this machine");
  }
  const bool recurrent = model_->is_recurrent() || model_->is_hybrid();
  if (recurrent && options.n_rs_seq > 0 && !rolls_back(model_->arch())) {
    throw Unsupported("taking tokens back (n_rs_seq) gives wrong states on " + model_->arch() +
                      "; save and restore sequences instead");
  }
  if (options.n_rs_seq > 0 && options.n_rs_seq + 2 > options.n_ubatch) {
    throw InvalidInput("n_ubatch must be at least n_rs_seq + 2 (" + std::to_string(options.n_rs_seq + 2) +
                       "), not " + std::to_string(options.n_ubatch));
  }
  if (options.n_seq_max > 1 && !model_->batches_sequences()) {
    throw Unsupported("the engine computes " + model_->arch() +
                      " wrongly with several sequences in a context; use contexts of n_seq_max=1");
  }
  // Recurrent layers are computed in equal shares of a ubatch; some graphs abort when they do not come out.
  if (recurrent) {
    options_.n_ubatch = std::max(options.n_seq_max, options.n_ubatch - options.n_ubatch % options.n_seq_max);
  }

  auto params = llama_context_default_params();
  params.n_ctx = options_.n_ctx;
  params.n_batch = options_.n_batch;
  params.n_ubatch = options_.n_ubatch;
  params.n_seq_max = options.n_seq_max;
  params.n_rs_seq = options.n_rs_seq;
  params.n_outputs_max = options.n_outputs_max;
  params.n_threads = options.n_threads;
  params.n_threads_batch = options.n_threads;
  params.type_k = cache_type(options.type_k);
  params.type_v = cache_type(options.type_v);
  params.flash_attn_type = static_cast<llama_flash_attn_type>(options.flash_attention);
  params.kv_unified = options.kv_unified;
  params.swa_full = options.swa_full;
  params.no_perf = true;
  params.cb_eval_user_data = this;
  params.abort_callback = [](void* self) { return static_cast<Context*>(self)->interrupted(); };
  params.abort_callback_data = this;

  held_.resize(options.n_seq_max);
  rewindable_.resize(options.n_seq_max, 0);
  threadpool_ = make_threadpool(options.n_threads);
  const LogScope log;
  guarded("the engine cannot make this context",
          [&] { context_.reset(llama_init_from_model(model_->handle(), params)); });
  if (!context_) {
    throw Unsupported("the engine cannot make this context: " +
                      (log.text().empty() ? std::string("it gave no reason") : log.text()));
  }
  llama_attach_threadpool(context_.get(), threadpool_.get(), nullptr);
}

Use Context::in_use() const {
  if (broken_) {
    throw EngineFailed("an earlier call failed inside of the engine; close this context and make another");
  }
  return Use(mutex_, *model_);
}

Context::~Context() {
  // In a forked child the engine's threads are gone and cannot be joined: what they share is left alone.
  if (model_->process() == static_cast<int32_t>(getpid())) return;
  static_cast<void>(context_.release());
  static_cast<void>(threadpool_.release());
}

uint32_t Context::n_ctx() const { return llama_n_ctx(context_.get()); }
uint32_t Context::n_ctx_seq() const { return llama_n_ctx_seq(context_.get()); }
uint32_t Context::n_batch() const { return llama_n_batch(context_.get()); }
uint32_t Context::n_ubatch() const { return llama_n_ubatch(context_.get()); }
bool Context::flash_attention() const { return internals::flash_attention(context_.get()); }
bool Context::causal() const { return internals::causal_attention(context_.get()); }
bool Context::has_memory() const {
  return llama_get_memory(context_.get()) != nullptr && !model_->is_encoder();
}

void Context::validate(const Batch& batch) const {
  const int32_t n = batch.size();
  if (n == 0) throw InvalidInput("the batch is empty");
  if (batch.has_embeddings() && !model_->takes_embeddings()) {
    throw Unsupported("the engine computes " + model_->arch() + " of tokens only, not of embeddings");
  }
  if (batch.has_embeddings() && batch.n_embd() != model_->n_embd_input()) {
    throw InvalidInput("embeddings must be " + std::to_string(model_->n_embd_input()) + " wide, not " +
                       std::to_string(batch.n_embd()));
  }
  std::vector<std::vector<int32_t>> positions(options_.n_seq_max);
  std::set<int32_t> used;
  for (int32_t row = 0; row < n; ++row) {
    const auto where = "entry " + std::to_string(row) + ": ";
    if (!batch.has_embeddings()) {
      const int32_t token = batch.tokens()[row];
      if (token < 0 || token >= model_->vocab().size()) {
        throw InvalidInput(where + "token id " + std::to_string(token) + " is outside of the vocabulary of " +
                           std::to_string(model_->vocab().size()));
      }
    }
    const int32_t position = batch.positions()[row];
    if (position < 0) throw InvalidInput(where + "position " + std::to_string(position) + " is negative");
    if (position >= model_->position_limit()) {
      throw InvalidInput(where + "position " + std::to_string(position) + " is beyond the " +
                         std::to_string(model_->position_limit()) + " that the model has");
    }
    const auto& sequences = batch.sequences()[row];
    if (sequences.empty()) throw InvalidInput(where + "it belongs to no sequence");
    if (sequences.size() > 1 && !shares_entries()) {
      throw InvalidInput(where +
                         "it belongs to several sequences, which takes kv_unified=True and a model with " +
                         "attention; add it once for each");
    }
    for (const int32_t seq : sequences) {
      if (seq < 0 || seq >= static_cast<int32_t>(options_.n_seq_max)) {
        throw InvalidInput(where + "sequence id " + std::to_string(seq) + " is not in 0.." +
                           std::to_string(options_.n_seq_max - 1) + " (n_seq_max of the context)");
      }
      positions[seq].push_back(position);
      used.insert(seq);
    }
    if (sequences.size() > 1 && !options_.kv_unified) {
      throw InvalidInput(where + "it belongs to several sequences; that needs kv_unified=True");
    }
  }
  if (at_once()) {
    if (n > static_cast<int32_t>(n_ubatch())) {
      throw InvalidInput("a model without causal attention sees all " + std::to_string(n) +
                         " tokens at once; the context's n_ubatch allows " + std::to_string(n_ubatch()));
    }
    if (!has_memory() && options_.n_outputs_max > 0 && n > static_cast<int32_t>(options_.n_outputs_max)) {
      throw InvalidInput("a model without causal attention makes all " + std::to_string(n) +
                         " tokens outputs; the context's n_outputs_max allows " +
                         std::to_string(options_.n_outputs_max));
    }
    if (!has_memory()) return;
    if (used.size() > 1 && !options_.kv_unified) {
      throw InvalidInput(
          "a model without causal attention computes several sequences with kv_unified=True only");
    }
  }
  for (int32_t seq = 0; seq < static_cast<int32_t>(options_.n_seq_max); ++seq) {
    auto& of_seq = positions[seq];
    if (of_seq.empty()) continue;
    std::sort(of_seq.begin(), of_seq.end());
    const int32_t last = llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq);
    const auto what = "sequence " + std::to_string(seq) + ": ";
    if (model_->n_positions() > 1) {
      if (of_seq.front() <= last) {
        throw InvalidInput(what + "position " + std::to_string(of_seq.front()) + " must come after " +
                           std::to_string(last) + ", the last one in memory");
      }
      continue;
    }
    if (last >= 0 && of_seq.front() != last + 1) {
      throw InvalidInput(what + "the next position must be " + std::to_string(last + 1) + ", not " +
                         std::to_string(of_seq.front()) + "; remove what is in memory or continue it");
    }
    for (size_t i = 1; i < of_seq.size(); ++i) {
      if (of_seq[i] == of_seq[i - 1]) {
        throw InvalidInput(what + "position " + std::to_string(of_seq[i]) + " occurs twice");
      }
      if (of_seq[i] != of_seq[i - 1] + 1) {
        throw InvalidInput(what + "position " + std::to_string(of_seq[i - 1] + 1) + " is missing");
      }
    }
  }
}

std::vector<Piece> Context::plan(const Batch& batch, const DecodeObserver* observer,
                                 bool memory_is_scratch) const {
  const auto n = static_cast<size_t>(batch.size());
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  if (!has_memory()) return {Piece{order, order, observer != nullptr && memory_is_scratch}};

  // The engine wants the positions of a sequence in rising order.
  std::vector<int32_t> last(options_.n_seq_max, -1);
  bool rising = true;
  for (const int32_t row : order) {
    for (const int32_t seq : batch.sequences()[row]) {
      rising = rising && batch.positions()[row] > last[seq];
      last[seq] = batch.positions()[row];
    }
  }
  if (!rising) {
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return batch.positions()[a] < batch.positions()[b]; });
  }

  const auto needed = [&](int32_t row) { return observer != nullptr && observer->needs_last_block(row); };
  const bool any_output =
      std::any_of(order.begin(), order.end(), [&](int32_t r) { return batch.outputs()[r]; });

  // Entries whose last block is wanted but whose logits are not come first, in pieces that end before
  // the output head. The others start, in each sequence, with its first output.
  std::vector<int32_t> early;
  std::vector<int32_t> late;
  std::vector<bool> started(options_.n_seq_max, false);
  bool early_needed = false;
  for (const int32_t row : order) {
    const auto& sequences = batch.sequences()[row];
    const bool is_late = batch.outputs()[row] || std::any_of(sequences.begin(), sequences.end(),
                                                             [&](int32_t seq) { return started[seq]; });
    if (is_late) {
      for (const int32_t seq : sequences) started[seq] = true;
    }
    early_needed = early_needed || (!is_late && needed(row));
    (is_late ? late : early).push_back(row);
  }
  if (any_output && !early_needed) {
    late = order;
    early.clear();
  }

  if (at_once()) {
    late = order;
    early.clear();
  }
  std::vector<Piece> pieces;
  const size_t outputs_max = options_.n_outputs_max > 0 ? options_.n_outputs_max : n_batch();
  const auto cut = [&](const std::vector<int32_t>& rows, bool may_stop, size_t longest) {
    Piece piece;
    piece.may_stop = may_stop;
    for (const int32_t row : rows) {
      const bool flagged = batch.outputs()[row] || needed(row);
      if (piece.rows.size() == longest || (flagged && piece.output_rows.size() == outputs_max)) {
        pieces.push_back(std::move(piece));
        piece = Piece{};
        piece.may_stop = may_stop;
      }
      piece.rows.push_back(row);
      if (flagged) piece.output_rows.push_back(row);
    }
    if (!piece.rows.empty()) pieces.push_back(std::move(piece));
  };
  const bool early_may_stop = observer != nullptr && (memory_is_scratch || observer->stop_keeps_memory());
  // The engine makes room for logits of every flagged entry of a call, computed or not.
  cut(early, early_may_stop, early_needed ? std::min(n_ubatch(), n_batch()) : n_batch());
  cut(late, observer != nullptr && memory_is_scratch && !any_output, n_batch());
  if (at_once() && pieces.size() > 1) {
    throw InvalidInput(
        "a model without causal attention sees all tokens at once, but more of the batch pass "
        "through its last block than the context's n_outputs_max allows (" +
        std::to_string(outputs_max) + ")");
  }
  return pieces;
}

void Context::decode(const Batch& batch, DecodeObserver* observer, const Poll& poll) {
  const Use use = in_use();
  compute(batch, observer, /*memory_is_scratch=*/false, poll);
}

void Context::decode_scratch(const Batch& batch, DecodeObserver& observer, const Poll& poll) {
  const Use use = in_use();
  for (int32_t seq = 0; has_memory() && seq < static_cast<int32_t>(options_.n_seq_max); ++seq) {
    if (llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq) >= 0) {
      throw InvalidInput(
          "the context holds tokens; extraction needs an empty one (memory.clear() empties it)");
    }
  }
  struct Clear {
    Context& context;
    bool all_finite = false;
    ~Clear() {
      context.logit_rows_.clear();
      if (context.broken_ || !context.has_memory()) return;
      context.clear_memory();
      // Some kernels multiply what is masked by 0 rather than leave it out, which NaN survives.
      if (!all_finite) llama_memory_clear(llama_get_memory(context.context_.get()), /*data=*/true);
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
  if (poll && batch.size() >= kWatchedRows) {
    run_polling(
        [&](std::atomic<bool>& stop) {
          interrupt_ = &stop;
          try {
            run(batch, pieces, observer);
          } catch (...) {
            interrupt_ = nullptr;
            throw;
          }
          interrupt_ = nullptr;
        },
        poll);
  } else {
    run(batch, pieces, observer);
  }
}

void Context::run(const Batch& batch, std::vector<Piece>& pieces, DecodeObserver* observer) {
  const auto sequences = sequences_of(batch);
  std::vector<int32_t> last;
  for (const int32_t seq : sequences) {
    last.push_back(has_memory() ? llama_memory_seq_pos_max(llama_get_memory(context_.get()), seq) : -1);
  }
  nodes_seen_ = 0;
  try {
    for (auto& piece : pieces) run_piece(batch, piece, sequences.size() == 1, observer);
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

void Context::run_piece(const Batch& batch, Piece& piece, bool one_sequence, DecodeObserver* observer) {
  const EngineBatch engine_batch(batch, piece, model_->n_positions());
  const auto given = piece.rows;
  const auto hooks = observer == nullptr ? std::vector<int32_t>() : observer->hooked_layers();
  // Without anyone to see them, the stops between nodes serve interruption alone; the CPU back end has its
  // own.
  const bool nodes = hooks.empty() && (observer != nullptr || !model_->on_gpu());
  watch(hooks, nodes);
  // Several sequences may be computed in another order than they are given in; the hooks put that right.
  std::vector<std::vector<int32_t>> ubatches;
  if (has_memory() && (!one_sequence || options_.n_rs_seq > 0)) {
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
  int32_t status = 0;
  try {
    const auto compute = [&] {
      return model_->is_encoder() ? llama_encode(context_.get(), engine_batch.view)
                                  : llama_decode(context_.get(), engine_batch.view);
    };
    // The first node that is seen ends the guard: without one, threads may be at work when it is needed.
    status = nodes ? guarded("decode", compute) : compute();
  } catch (...) {
    broken_ = true;
    throw;
  }
  // Also brings back errors of asynchronous back ends before anyone reads.
  llama_synchronize(context_.get());
  observer_ = nullptr;
  // Other graphs (moving positions in the cache) are not for the callback to see, nor to stop.
  internals::set_callback(context_.get(), nullptr);

  if (observer_error_) std::rethrow_exception(std::exchange(observer_error_, nullptr));
  if (interrupted() || status == 2) throw Interrupted();
  if (status == 1) throw ContextFull(full_message(batch));
  if (status == -1) throw InvalidInput("the engine refuses the batch: " + log.text());
  if (status != 0)
    throw EngineFailed("decode failed with status " + std::to_string(status) + ": " + log.text());
  note_held(batch, given, ubatches);
  for (const int32_t layer : hooks) observer->hooked(layer, internals::hooked_rows(context_.get(), layer));
  if (observer != nullptr) observer->end();
  if (piece.may_stop) return;
  has_logits_ = Graph(internals::computed_graph(context_.get())).has_logits();
  if (!has_logits_) return;
  for (size_t index = 0; index < given.size(); ++index) {
    const int32_t row = given[index];
    if (batch.outputs()[row]) logit_rows_[row] = {true, static_cast<int32_t>(index)};
  }
}

std::string Context::full_message(const Batch& batch) const {
  // Pieces of this batch that are there already are taken back after this.
  std::vector<Positions> held = held_;
  for (int32_t row = 0; row < batch.size(); ++row) {
    const int64_t position = batch.positions()[row];
    for (const int32_t seq : batch.sequences()[row]) held[seq].remove({position, position + 1});
  }
  int64_t used = 0;
  for (const auto& of_sequence : held) used += of_sequence.count();
  return "the context has room for " + std::to_string(n_ctx_seq()) + " tokens " +
         (options_.kv_unified ? "" : "a sequence ") + "(n_ctx); its sequences hold " + std::to_string(used) +
         " and the batch brings " + std::to_string(batch.size()) +
         "; remove sequences or make a larger context";
}

void Context::note_held(const Batch& batch, const std::vector<int32_t>& given,
                        const std::vector<std::vector<int32_t>>& ubatches) {
  for (const int32_t row : given) {
    const int64_t position = batch.positions()[row];
    for (const int32_t seq : batch.sequences()[row]) held_[seq].add({position, position + 1});
  }
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
    row = {false, static_cast<int32_t>(kept_logits_.size() / n_vocab)};
    kept_logits_.insert(kept_logits_.end(), values, values + n_vocab);
  }
}

void Context::copy_logits(int32_t row, float* target) const {
  const Use use = in_use();
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
  const auto n_vocab = static_cast<size_t>(model_->vocab().size());
  const float* values = found.in_engine ? llama_get_logits_ith(context_.get(), found.index)
                                        : kept_logits_.data() + static_cast<size_t>(found.index) * n_vocab;
  if (values == nullptr) throw EngineFailed("the engine has no logits for row " + std::to_string(row));
  std::copy(values, values + n_vocab, target);
}

void Context::roll_back(const std::vector<int32_t>& sequences, const std::vector<int32_t>& last) {
  if (!has_memory()) return;
  auto* memory = llama_get_memory(context_.get());
  for (size_t i = 0; i < sequences.size(); ++i) {
    if (llama_memory_seq_pos_max(memory, sequences[i]) == last[i]) continue;
    const int32_t end = last[i] + 1;
    const bool recurrent = model_->is_recurrent() || model_->is_hybrid();
    if (end == 0 || recurrent || !can_remove_suffix(sequences[i], end) ||
        !llama_memory_seq_rm(memory, sequences[i], end, -1)) {
      drop(sequences[i]);
    } else {
      held_[sequences[i]].remove({end, INT64_MAX});
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
    ++nodes_seen_;
    const Graph graph(internals::computed_graph(context_.get()));
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

Graph Context::reserve_graph(uint32_t n_tokens, uint32_t n_outputs) {
  const Use use = in_use();
  const auto* result = guarded("the engine cannot build a graph",
                               [&] { return internals::reserve_graph(context_.get(), n_tokens, n_outputs); });
  if (result == nullptr) {
    throw EngineFailed("the engine cannot build a graph of " + std::to_string(n_tokens) + " tokens");
  }
  return Graph(result);
}

}  // namespace llamatap
