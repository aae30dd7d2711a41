#include "draft/speculative_context.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "draft/store_only.hpp"
#include "engine/error.hpp"
#include "engine/model/mtp_blocks.hpp"

namespace llamatap {

namespace {

// Vocabularies of one family differ by padding at the end.
constexpr int32_t kMostPadding = 128;

std::string number(int64_t value) { return std::to_string(value); }

int32_t metadata_number(const Model& model, const std::string& key, int32_t otherwise) {
  const auto found = model.metadata().find(key);
  if (found == model.metadata().end()) return otherwise;
  if (const auto* value = std::get_if<uint64_t>(&found->second)) return static_cast<int32_t>(*value);
  if (const auto* value = std::get_if<int64_t>(&found->second)) return static_cast<int32_t>(*value);
  return otherwise;
}

bool metadata_flag(const Model& model, const std::string& key, bool otherwise) {
  const auto found = model.metadata().find(key);
  if (found == model.metadata().end()) return otherwise;
  const auto* value = std::get_if<bool>(&found->second);
  return value == nullptr ? otherwise : *value;
}

}  // namespace

DraftKind SpeculativeContext::kind_of(const Model& draft) {
  const std::string arch = draft.arch();
  if (mtp_blocks(arch).borrows_memory) return DraftKind::mtp;
  if (arch == "eagle3") return DraftKind::eagle3;
  if (arch == "dflash") return DraftKind::dflash;
  const bool has_mtp = draft.options().load_mtp && draft.draft_traits().n_mtp > 0;
  return has_mtp ? DraftKind::mtp : DraftKind::model;
}

SpeculativeContext::SpeculativeContext(std::shared_ptr<Context> target, std::shared_ptr<Model> draft,
                                       DraftKind kind, ContextOptions options)
    : kind_(kind), target_(std::move(target)), draft_(std::move(draft)) {
  if (draft_->options().vocab_only) throw Unsupported("the draft model was loaded without its weights");
  if (target_->drafts()) throw InvalidInput("the target is itself a context that drafts");
  if (!target_->has_memory() || !target_->causal()) {
    throw Unsupported(target_->model()->arch() + " does not generate text, so there is nothing to draft");
  }
  check_vocabulary();
  switch (kind_) {
    case DraftKind::model:
      if (const auto reason = draft_->refusal(); !reason.empty()) {
        throw Unsupported(draft_->arch() + ": " + reason);
      }
      if (draft_->is_recurrent() || draft_->is_hybrid()) {
        throw Unsupported(draft_->arch() + " cannot take tokens back, which a draft model must");
      }
      break;
    case DraftKind::eagle3:
      fit_features("EAGLE-3");
      break;
    case DraftKind::mtp:
      fit_mtp();
      break;
    case DraftKind::dflash:
      fit_dflash();
      break;
  }
  if (kind_ != DraftKind::model) options.target = target_;
  options.mtp = kind_ == DraftKind::mtp;
  if (shares_memory_) fit_shared_memory(options);
  if (kind_ == DraftKind::dflash) {
    options.causal = metadata_flag(*draft_, "dflash.attention.causal", false);
    options.n_ubatch = std::max(options.n_ubatch, static_cast<uint32_t>(block_.size));
    options.n_batch = std::max(options.n_batch, options.n_ubatch);
  }
  const auto window = static_cast<uint32_t>(draft_->n_swa());
  if (n_heads_ > 1 && window > 0 && window < options.n_ctx && options.kv_unified && options.n_seq_max > 1) {
    throw Unsupported("several MTP blocks with sliding windows must keep sequences apart (kv_unified=False)");
  }
  if (shares_memory_) {
    const ContextLock lock = target_->hold();
    // The engine empties the places that both share when it makes the second context.
    if (!target_->is_empty()) {
      throw InvalidInput(
          "the draft attends to the target's memory, which must be empty when the speculative context is "
          "made; "
          "make it first, or clear the memory (memory.clear())");
    }
    make_context(options);
  } else {
    make_context(options);
  }
  if (kind_ == DraftKind::model && (!context_->has_memory() || !context_->causal())) {
    throw Unsupported(draft_->arch() + " does not generate text, so it cannot draft");
  }
}

void SpeculativeContext::make_context(const ContextOptions& options) {
  try {
    context_ = std::make_shared<Context>(draft_, options);
  } catch (const Unsupported&) {
    if (!inherits_ || !target_->model()->on_gpu() || draft_->on_gpu()) throw;
    throw Unsupported(
        "the draft uses the token embedding or output head of its target, which are on a GPU; load it there "
        "too (n_gpu_layers=-1)");
  }
}

void SpeculativeContext::check_vocabulary() const {
  const auto& ours = target_->model()->vocab();
  const auto& theirs = draft_->vocab();
  const int32_t padding = std::abs(ours.size() - theirs.size());
  if (padding > (kind_ == DraftKind::model ? kMostPadding : 0)) {
    throw InvalidInput("the draft's vocabulary has " + number(theirs.size()) + " tokens and the target's " +
                       number(ours.size()) + "; a draft is made for one target");
  }
  if (kind_ != DraftKind::model || !ours.has_tokenizer() || !theirs.has_tokenizer()) return;
  // Special tokens come first and are often spelled anew.
  for (int32_t token = 8; token < std::min(ours.size(), theirs.size()); ++token) {
    if (ours.text(token) != theirs.text(token)) {
      throw InvalidInput("token " + number(token) + " is '" + theirs.text(token) + "' in the draft and '" +
                         ours.text(token) + "' in the target; a draft model needs the target's vocabulary");
    }
  }
}

void SpeculativeContext::store(const Batch& batch, const Poll& poll) {
  StoreOnly observer;
  const bool one_block = kind_ == DraftKind::eagle3 || kind_ == DraftKind::mtp;
  context_->decode(batch, one_block ? &observer : nullptr, poll);
}

void SpeculativeContext::check_width(int32_t n_embd_out) const {
  if (n_embd_out == draft_->n_embd()) return;
  throw InvalidInput("the draft is " + number(draft_->n_embd()) + " wide, but " + draft_->arch() +
                     ".embedding_length_out says that its states are " + number(n_embd_out) +
                     "; the key must be left out or be the same");
}

void SpeculativeContext::check_layers(const std::vector<int32_t>& layers) const {
  const int32_t n = target_->model()->n_layer();
  for (const int32_t layer : layers) {
    if (layer < 0 || layer > n) {
      throw InvalidInput("the draft wants layer " + number(layer) + " of the target, which has 0.." +
                         number(n) + "; it was made for another");
    }
  }
}

/// Layers of the target, embedding and head of their own or the target's, and d2t.
void SpeculativeContext::fit_features(const char* what) {
  const auto traits = draft_->draft_traits();
  const auto own = target_->model()->draft_traits();
  const int32_t width = target_->model()->n_embd();
  check_layers(traits.target_layers);
  target_slots_ = traits.target_layers;
  n_features_ = static_cast<int32_t>(target_slots_.size()) * width;
  n_state_ = draft_->n_embd();
  check_width(traits.n_embd_out);
  if (traits.n_features != n_features_) {
    const auto n_layers = static_cast<int32_t>(std::max<size_t>(1, target_slots_.size()));
    throw InvalidInput("the " + std::string(what) + " draft takes " + number(traits.n_features) +
                       " values, of " + number(n_layers) + " layers of " +
                       number(traits.n_features / n_layers) + "; the target's are " + number(width) +
                       " wide");
  }
  inherits_ = traits.n_embedding == 0 || traits.n_head_rows == 0;
  if (inherits_ && n_state_ != width) {
    throw InvalidInput("the draft uses the target's token embedding or output head, of width " +
                       number(width) + ", but is " + number(n_state_) + " wide itself");
  }
  if (traits.n_embedding == 0 && own.n_embedding == 0) {
    throw Unsupported("neither the draft nor the target has a token embedding");
  }
  const int32_t n_vocab = draft_->vocab().size();
  if (traits.n_embedding > 0 && traits.n_embedding_rows < n_vocab) {
    throw InvalidInput("the draft's token embedding has " + number(traits.n_embedding_rows) +
                       " rows for a vocabulary of " + number(n_vocab));
  }
  const int32_t rows = traits.n_head_rows > 0 ? traits.n_head_rows : own.n_head_rows;
  const auto expected = traits.d2t.empty() ? int64_t{n_vocab} : static_cast<int64_t>(traits.d2t.size());
  if (rows != expected) {
    throw InvalidInput("the draft's output head has " + number(rows) + " rows, its " +
                       (traits.d2t.empty() ? "vocabulary " : "d2t ") + number(expected));
  }
  std::set<int64_t> seen;
  for (const int64_t token : traits.d2t) {
    if (token < 0 || token >= n_vocab) {
      throw InvalidInput("d2t names token " + number(token) + " of a vocabulary of " + number(n_vocab) +
                         "; in GGUF it holds ids of the target, not offsets");
    }
    if (!seen.insert(token).second) {
      throw InvalidInput("d2t names token " + number(token) + " twice; in GGUF it holds ids, not offsets");
    }
  }
}

void SpeculativeContext::fit_mtp() {
  const auto traits = draft_->draft_traits();
  const std::string arch = draft_->arch();
  const auto blocks = mtp_blocks(arch);
  if (blocks.borrows_memory && target_->model()->draft_traits().n_embedding == 0) {
    throw Unsupported("the draft uses the target's token embedding, which it does not have");
  }
  if (traits.n_mtp == 0) {
    throw InvalidInput(draft_->options().load_mtp
                           ? "the file has no MTP block (" + arch + ".nextn_predict_layers)"
                           : "the model was loaded without its MTP blocks; load it with load_mtp=True");
  }
  if (arch == "deepseek4") throw Unsupported("deepseek4 carries several residual streams, not one");
  const int32_t width = target_->model()->n_embd();
  if (traits.n_embd_out != width) {
    throw InvalidInput("the MTP block takes states of width " + number(traits.n_embd_out) +
                       "; the target's are " + number(width) + " wide");
  }
  const int32_t n = target_->model()->n_layer();
  target_slots_ = {blocks.pre_norm ? n : n + 1};
  n_features_ = width;
  n_state_ = width;
  shares_memory_ = blocks.borrows_memory;
  if (!shares_memory_) check_width(traits.n_embd_out);
  n_heads_ = shares_memory_ ? 1 : traits.n_mtp;
}

void SpeculativeContext::fit_shared_memory(ContextOptions& options) const {
  const auto& theirs = target_->options();
  const auto mismatch = draft_->shared_memory_mismatch(*target_->model());
  if (!mismatch.empty()) {
    throw InvalidInput("the draft attends to the memory of another kind of target: " + mismatch);
  }
  // It is the same memory, read by both.
  options.n_ctx = theirs.n_ctx;
  options.n_seq_max = theirs.n_seq_max;
  options.type_k = theirs.type_k;
  options.type_v = theirs.type_v;
  options.kv_unified = theirs.kv_unified;
  options.swa_full = theirs.swa_full;
  options.flash_attention = target_->flash_attention() ? 1 : 0;
}

void SpeculativeContext::decode(const Batch& batch, const Poll& poll) {
  if (!shares_memory_) {
    context_->decode(batch, nullptr, poll);
    return;
  }
  const ContextLock lock = target_->hold();
  context_->decode(batch, nullptr, poll);
}

void SpeculativeContext::fit_dflash() {
  const auto traits = draft_->draft_traits();
  if (traits.has_selector) throw Unsupported("DFlash2 files, which have a selector, are not supported");
  if (metadata_number(*draft_, "dflash.hyper_connection.count", 0) > 0) {
    throw Unsupported("DSpark files for DeepSeek-V4, with several residual streams, are not supported");
  }
  if (traits.target_layers.empty()) throw InvalidInput("the file names no layers (dflash.target_layers)");
  fit_features("DFlash");
  n_state_ = 0;
  const auto mask = draft_->vocab().mask();
  if (!mask) {
    throw InvalidInput(
        "the DFlash file names no mask token of its vocabulary (tokenizer.ggml.mask_token_id)");
  }
  draft_->vocab().check(*mask);
  block_.mask_token = *mask;
  block_.size = metadata_number(*draft_, "dflash.block_size", 16);
  block_.chained = traits.has_markov;
  block_.has_confidence = traits.has_confidence;
  if (block_.chained && metadata_flag(*draft_, "dflash.sample_from_anchor", true)) block_.first_slot = 0;
  if (block_.size <= block_.first_slot || block_.size > 1024) {
    throw InvalidInput("dflash.block_size is " + number(block_.size) + "; expected 2..1024");
  }
}

int32_t SpeculativeContext::n_vocab() const {
  return std::min(draft_->vocab().size(), target_->model()->vocab().size());
}

std::unique_lock<std::mutex> SpeculativeContext::hold() {
  std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
  if (!held) throw Busy("another thread is using this speculative context");
  return held;
}

void SpeculativeContext::check_sequence(int32_t seq) const {
  const auto n = static_cast<int32_t>(context_->options().n_seq_max);
  if (seq < 0 || seq >= n) {
    throw InvalidInput("sequence id " + number(seq) + " is not in 0.." + number(n - 1) +
                       " (n_seq_max of the speculative context)");
  }
}

void SpeculativeContext::encode(const float* features, int32_t n, float* states, const Poll& poll) {
  if (kind_ == DraftKind::dflash) {
    throw Unsupported(
        "DFlash files have no encoder: the draft takes the features themselves; use DFlashDrafter");
  }
  if (kind_ == DraftKind::eagle3) {
    context_->encode(features, n, states, poll);
  } else {
    std::copy(features, features + static_cast<size_t>(n) * static_cast<size_t>(n_features_), states);
  }
}

}  // namespace llamatap
