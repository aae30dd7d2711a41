#include "draft/draft_fit.hpp"

#include <algorithm>
#include <cstdlib>
#include <set>
#include <string>
#include <variant>

#include "engine/error.hpp"
#include "engine/model/mtp_blocks.hpp"

namespace llamatap {

namespace {

// Vocabularies of one model family differ in padding at the end.
constexpr int32_t kMaxPadding = 128;

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

void check_vocabulary(const Model& target, const Model& draft, DraftKind kind) {
  const auto& ours = target.vocab();
  const auto& theirs = draft.vocab();
  const int32_t padding = std::abs(ours.size() - theirs.size());
  if (padding > (kind == DraftKind::model ? kMaxPadding : 0)) {
    throw InvalidInput("the draft's vocabulary has " + number(theirs.size()) + " tokens and the target's " +
                       number(ours.size()) + "; use a draft made for this target");
  }
  if (kind != DraftKind::model || !ours.has_tokenizer() || !theirs.has_tokenizer()) return;
  // Special tokens come first and may be spelled differently.
  for (int32_t token = 8; token < std::min(ours.size(), theirs.size()); ++token) {
    if (ours.text(token) != theirs.text(token)) {
      throw InvalidInput("token " + number(token) + " is '" + theirs.text(token) + "' in the draft and '" +
                         ours.text(token) + "' in the target; a draft model needs the target's vocabulary");
    }
  }
}

void check_width(const Model& draft, int32_t n_embd_out) {
  if (n_embd_out == draft.n_embd()) return;
  throw InvalidInput("the draft is " + number(draft.n_embd()) + " wide, but " + draft.arch() +
                     ".embedding_length_out says that its states are " + number(n_embd_out) +
                     "; remove the key or make it equal");
}

void check_layers(const Model& target, const std::vector<int32_t>& layers) {
  const int32_t n = target.n_layer();
  for (const int32_t layer : layers) {
    if (layer < 0 || layer > n) {
      throw InvalidInput("the draft needs layer " + number(layer) + " of the target, which has 0.." +
                         number(n) + "; it was made for another target");
    }
  }
}

/// Checks the draft's token embedding and output head, its own or the target's.
void check_matrices(const Model& target, const Model& draft, const DraftFit& fit, const DraftTraits& traits) {
  const auto own = target.draft_traits();
  const int32_t width = target.n_embd();
  if (fit.inherits && fit.n_state != width) {
    throw InvalidInput("the draft uses the target's token embedding or output head, of width " +
                       number(width) + ", but is " + number(fit.n_state) + " wide itself");
  }
  if (traits.n_embedding == 0 && own.n_embedding == 0) {
    throw Unsupported("neither the draft nor the target has a token embedding");
  }
  const int32_t n_vocab = draft.vocab().size();
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
}

void check_d2t(const std::vector<int64_t>& d2t, int32_t n_vocab) {
  std::set<int64_t> seen;
  for (const int64_t token : d2t) {
    if (token < 0 || token >= n_vocab) {
      throw InvalidInput("d2t names token " + number(token) + " of a vocabulary of " + number(n_vocab) +
                         "; in GGUF it holds ids of the target, not offsets");
    }
    if (!seen.insert(token).second) {
      throw InvalidInput("d2t names token " + number(token) + " twice; in GGUF it holds ids, not offsets");
    }
  }
}

/// Fits a draft that takes features of the target's layers: EAGLE-3, DFlash.
DraftFit fit_features(const Model& target, const Model& draft, const char* what) {
  DraftFit fit;
  const auto traits = draft.draft_traits();
  const int32_t width = target.n_embd();
  check_layers(target, traits.target_layers);
  fit.target_slots = traits.target_layers;
  fit.n_features = static_cast<int32_t>(fit.target_slots.size()) * width;
  fit.n_state = draft.n_embd();
  check_width(draft, traits.n_embd_out);
  if (traits.n_features != fit.n_features) {
    const auto n_layers = static_cast<int32_t>(std::max<size_t>(1, fit.target_slots.size()));
    throw InvalidInput("the " + std::string(what) + " draft takes " + number(traits.n_features) +
                       " values, of " + number(n_layers) + " layers of " +
                       number(traits.n_features / n_layers) + "; the target's are " + number(width) +
                       " wide");
  }
  fit.inherits = traits.n_embedding == 0 || traits.n_head_rows == 0;
  check_matrices(target, draft, fit, traits);
  check_d2t(traits.d2t, draft.vocab().size());
  return fit;
}

DraftFit fit_model(const Model& draft) {
  if (const auto reason = draft.refusal(); !reason.empty()) throw Unsupported(draft.arch() + ": " + reason);
  if (draft.is_recurrent() || draft.is_hybrid()) {
    throw Unsupported(draft.arch() + " cannot roll back tokens, as a draft model must");
  }
  return {};
}

DraftFit fit_mtp(const Model& target, const Model& draft) {
  DraftFit fit;
  const auto traits = draft.draft_traits();
  const std::string arch = draft.arch();
  const auto blocks = mtp_blocks(arch);
  if (blocks.borrows_memory && target.draft_traits().n_embedding == 0) {
    throw Unsupported("the draft uses the target's token embedding, but the target has none");
  }
  if (traits.n_mtp == 0) {
    throw InvalidInput(draft.options().load_mtp
                           ? "the file has no MTP block (" + arch + ".nextn_predict_layers)"
                           : "the model was loaded without its MTP blocks; load it with load_mtp=True");
  }
  if (arch == "deepseek4") throw Unsupported("deepseek4 has several residual streams; MTP drafts need one");
  const int32_t width = target.n_embd();
  if (traits.n_embd_out != width) {
    throw InvalidInput("the MTP block takes states of width " + number(traits.n_embd_out) +
                       "; the target's are " + number(width) + " wide");
  }
  const int32_t n = target.n_layer();
  fit.target_slots = {blocks.pre_norm ? n : n + 1};
  fit.n_features = width;
  fit.n_state = width;
  fit.shares_memory = blocks.borrows_memory;
  if (!fit.shares_memory) check_width(draft, traits.n_embd_out);
  fit.n_heads = fit.shares_memory ? 1 : traits.n_mtp;
  return fit;
}

DraftFit fit_dflash(const Model& target, const Model& draft) {
  const auto traits = draft.draft_traits();
  if (traits.has_selector) throw Unsupported("DFlash2 files, which have a selector, are not supported");
  if (metadata_number(draft, "dflash.hyper_connection.count", 0) > 0) {
    throw Unsupported("DSpark files for DeepSeek-V4, with several residual streams, are not supported");
  }
  if (traits.target_layers.empty()) throw InvalidInput("the file names no layers (dflash.target_layers)");
  DraftFit fit = fit_features(target, draft, "DFlash");
  fit.n_state = 0;
  const auto mask = draft.vocab().mask();
  if (!mask) {
    throw InvalidInput(
        "the DFlash file names no mask token of its vocabulary (tokenizer.ggml.mask_token_id)");
  }
  draft.vocab().check(*mask);
  fit.block.mask_token = *mask;
  fit.block.size = metadata_number(draft, "dflash.block_size", 16);
  fit.block.chained = traits.has_markov;
  fit.block.has_confidence = traits.has_confidence;
  if (fit.block.chained && metadata_flag(draft, "dflash.sample_from_anchor", true)) fit.block.first_slot = 0;
  if (fit.block.size <= fit.block.first_slot || fit.block.size > 1024) {
    throw InvalidInput("dflash.block_size is " + number(fit.block.size) + "; expected 2..1024");
  }
  return fit;
}

/// Copies the target's sizes and cache types: both contexts read the same KV cache.
void share_memory(const Context& target, const Model& draft, ContextOptions& options) {
  const auto& theirs = target.options();
  const auto mismatch = draft.shared_memory_mismatch(*target.model());
  if (!mismatch.empty()) {
    throw InvalidInput("the draft attends to the KV cache of another kind of target: " + mismatch);
  }
  options.n_ctx = theirs.n_ctx;
  options.n_seq_max = theirs.n_seq_max;
  options.type_k = theirs.type_k;
  options.type_v = theirs.type_v;
  options.kv_unified = theirs.kv_unified;
  options.swa_full = theirs.swa_full;
  options.flash_attention = target.flash_attention() ? 1 : 0;
}

}  // namespace

DraftKind kind_of(const Model& draft) {
  const std::string arch = draft.arch();
  if (mtp_blocks(arch).borrows_memory) return DraftKind::mtp;
  if (arch == "eagle3") return DraftKind::eagle3;
  if (arch == "dflash") return DraftKind::dflash;
  const bool has_mtp = draft.options().load_mtp && draft.draft_traits().n_mtp > 0;
  return has_mtp ? DraftKind::mtp : DraftKind::model;
}

DraftFit fit_draft(const Model& target, const Model& draft, DraftKind kind) {
  check_vocabulary(target, draft, kind);
  switch (kind) {
    case DraftKind::eagle3: return fit_features(target, draft, "EAGLE-3");
    case DraftKind::mtp: return fit_mtp(target, draft);
    case DraftKind::dflash: return fit_dflash(target, draft);
    case DraftKind::model: break;
  }
  return fit_model(draft);
}

ContextOptions draft_options(const std::shared_ptr<Context>& target, const Model& draft, DraftKind kind,
                             const DraftFit& fit, ContextOptions options) {
  if (kind != DraftKind::model) options.target = target;
  options.mtp = kind == DraftKind::mtp;
  if (fit.shares_memory) share_memory(*target, draft, options);
  if (kind == DraftKind::dflash) {
    options.causal = metadata_flag(draft, "dflash.attention.causal", false);
    options.n_ubatch = std::max(options.n_ubatch, static_cast<uint32_t>(fit.block.size));
    options.n_batch = std::max(options.n_batch, options.n_ubatch);
  }
  const auto window = static_cast<uint32_t>(draft.n_swa());
  if (fit.n_heads > 1 && window > 0 && window < options.n_ctx && options.kv_unified &&
      options.n_seq_max > 1) {
    throw Unsupported("several MTP blocks with sliding windows need kv_unified=False for several sequences");
  }
  return options;
}

}  // namespace llamatap
