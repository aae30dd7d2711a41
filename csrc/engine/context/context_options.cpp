#include "engine/context/context_options.hpp"

#include <llama.h>

#include <algorithm>

#include "engine/error.hpp"
#include "engine/model/model.hpp"

namespace llamatap {

namespace {

/// Whether the engine's rollback of recurrent states gives exactly the earlier states.
bool rolls_back(const std::string& arch) { return arch == "qwen35" || arch == "qwen35moe"; }

void check_ranges(const ContextOptions& options) {
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
}

}  // namespace

ContextOptions settled_options(const ContextOptions& options, const Model& model) {
  check_ranges(options);
  ContextOptions settled = options;
  const bool is_recurrent = has_recurrent_memory(options, model);
  // The engine reserves an output for each sequence in every call.
  settled.n_batch = std::max(options.n_batch, options.n_seq_max);
  settled.n_ubatch = std::min(options.n_ubatch, settled.n_batch);
  const uint32_t n_ctx_train = static_cast<uint32_t>(model.n_ctx_train());
  settled.n_ctx = std::max(options.n_ctx == 0 ? n_ctx_train : options.n_ctx, options.n_seq_max);
  if (is_recurrent && options.n_rs_seq > 0 && !rolls_back(model.arch())) {
    throw Unsupported("rolling back tokens (n_rs_seq) gives wrong states on " + model.arch() +
                      "; save and restore sequences instead");
  }
  if (options.n_seq_max > 1 && !model.batches_sequences()) {
    throw Unsupported("the engine mixes up several sequences of " + model.arch() +
                      " in a context, or aborts; use contexts of n_seq_max=1");
  }
  // Recurrent layers split a ubatch equally between sequences; some graphs abort when it is not divisible.
  if (is_recurrent) {
    settled.n_ubatch = std::max(options.n_seq_max, settled.n_ubatch - settled.n_ubatch % options.n_seq_max);
  }

  if (options.n_rs_seq > 0 && options.n_rs_seq + 2 > settled.n_ubatch) {
    const uint32_t share = std::max(1U, options.n_seq_max);
    throw InvalidInput(
        "n_ubatch and n_batch must be at least n_rs_seq + 2, and a multiple of n_seq_max: at least " +
        std::to_string((options.n_rs_seq + 2 + share - 1) / share * share) + ", not " +
        std::to_string(options.n_ubatch) + " and " + std::to_string(options.n_batch));
  }
  return settled;
}

bool has_recurrent_memory(const ContextOptions& options, const Model& model) {
  return (model.is_recurrent() || model.is_hybrid()) && !options.mtp;
}

}  // namespace llamatap
