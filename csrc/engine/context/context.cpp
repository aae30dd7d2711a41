#include "engine/context/context.hpp"

#include <ggml.h>
#include <unistd.h>

#include <algorithm>

#include "engine/abort.hpp"
#include "engine/context/context_memory_check.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/memory_size.hpp"
#include "engine/private/draft_model.hpp"
#include "engine/private/engine_context.hpp"

namespace llamatap {

namespace {

ggml_type cache_type(const std::string& name) {
  for (const ggml_type type : {GGML_TYPE_F32, GGML_TYPE_F16, GGML_TYPE_BF16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_0,
                               GGML_TYPE_Q4_1, GGML_TYPE_IQ4_NL, GGML_TYPE_Q5_0, GGML_TYPE_Q5_1}) {
    if (name == ggml_type_name(type)) return type;
  }
  throw InvalidInput("unknown KV cache type '" + name +
                     "'; expected f32, f16, bf16, q8_0, q4_0, q4_1, iq4_nl, q5_0, q5_1");
}

llama_context_params engine_params(const ContextOptions& options) {
  auto params = llama_context_default_params();
  params.n_ctx = options.n_ctx;
  params.n_batch = options.n_batch;
  params.n_ubatch = options.n_ubatch;
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
  params.ctx_type = options.mtp ? LLAMA_CONTEXT_TYPE_MTP : LLAMA_CONTEXT_TYPE_DEFAULT;
  return params;
}

}  // namespace

Context::Context(std::shared_ptr<Model> model, const ContextOptions& options)
    : model_(std::move(model)),
      options_(options),
      memory_(*model_, options_),
      outputs_(*model_, drafts() ? static_cast<size_t>(state_width()) : 0),
      threadpool_(nullptr, nullptr) {
  if (model_->options().vocab_only) throw Unsupported("the model was loaded without its weights");
  if (model_->process() != static_cast<int32_t>(getpid())) {
    throw Unsupported("the model was loaded before a fork; load it in this process");
  }
  if (const auto reason = model_->refusal(); !reason.empty() && !drafts()) {
    throw Unsupported(model_->arch() + ": " + reason);
  }
  options_ = settled_options(options, *model_);
  auto params = engine_params(options_);
  params.ctx_other = drafts() ? options.target->context_.get() : nullptr;
  params.cb_eval_user_data = this;
  params.abort_callback = [](void* self) { return static_cast<Context*>(self)->interrupted(); };
  params.abort_callback_data = this;

  if (options.memory_available > 0 && !borrows_memory()) {
    require_context_memory(*model_, params, options.memory_available);
  }
  threadpool_ = make_threadpool(options.n_threads);
  const LogScope log;
  guarded("the engine cannot make this context",
          [&] { context_.reset(llama_init_from_model(model_->handle(), params)); });
  if (!context_) {
    const auto message = "the engine cannot make this context: " + log.reason();
    if (says_no_memory(message)) throw OutOfMemory(message);
    throw Unsupported(message);
  }
  memory_.attach(context_.get());
  outputs_.attach(context_.get());
  llama_attach_threadpool(context_.get(), threadpool_.get(), nullptr);
  if (drafts()) internals::give_next_states(context_.get(), options.causal);
}

ContextLock Context::hold() const {
  if (broken_) {
    throw EngineFailed("an earlier call failed inside the engine; close this context and make another");
  }
  return ContextLock(mutex_, *model_);
}

Context::~Context() {
  // A forked child does not have the engine's threads and cannot join them: leave shared objects alone.
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

Graph Context::reserve_graph(uint32_t n_tokens, uint32_t n_outputs) {
  const ContextLock lock = hold();
  const auto graph = guarded("the engine cannot build a graph",
                             [&] { return internals::reserve_graph(context_.get(), n_tokens, n_outputs); });
  if (!graph) {
    throw EngineFailed("the engine cannot build a graph of " + std::to_string(n_tokens) + " tokens");
  }
  return *graph;
}

void Context::copy_logits(int32_t row, float* target) const {
  const ContextLock lock = hold();
  const float* values = output_logits(row);
  std::copy(values, values + model_->vocab().size(), target);
}

}  // namespace llamatap
