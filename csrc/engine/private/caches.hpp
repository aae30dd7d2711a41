#pragma once

// Parts of an engine memory. For files that include its internal headers.

#include <vector>

#include "llama-kv-cache-dsa-iswa.h"
#include "llama-kv-cache-dsa.h"
#include "llama-kv-cache-dsv4.h"
#include "llama-kv-cache-iswa.h"
#include "llama-kv-cache-msa.h"
#include "llama-kv-cache.h"
#include "llama-memory-hybrid-iswa.h"
#include "llama-memory-hybrid.h"
#include "llama-memory-recurrent.h"
#include "llama-memory.h"

namespace llamatap::internals {

/// KV caches whose cells are tokens.
struct Caches {
  llama_kv_cache* all = nullptr;      // layers with full attention
  llama_kv_cache* windows = nullptr;  // layers with sliding windows, if separate

  /// The caches that are not null.
  std::vector<llama_kv_cache*> list() const {
    std::vector<llama_kv_cache*> found;
    for (auto* cache : {all, windows}) {
      if (cache != nullptr) found.push_back(cache);
    }
    return found;
  }
};

inline Caches caches_of(llama_memory_i* memory) {
  if (auto* both = dynamic_cast<llama_memory_hybrid*>(memory)) return {both->get_mem_attn(), nullptr};
  if (auto* both = dynamic_cast<llama_memory_hybrid_iswa*>(memory)) memory = both->get_mem_attn();
  if (auto* compressed = dynamic_cast<llama_kv_cache_dsv4*>(memory)) memory = compressed->get_raw();
  if (auto* both = dynamic_cast<llama_kv_cache_iswa*>(memory)) return {both->get_base(), both->get_swa()};
  if (auto* sparse = dynamic_cast<llama_kv_cache_dsa_iswa*>(memory)) {
    return {sparse->get_dsa()->get_mla(), sparse->get_swa()};
  }
  if (auto* sparse = dynamic_cast<llama_kv_cache_dsa*>(memory)) return {sparse->get_mla(), nullptr};
  if (auto* sparse = dynamic_cast<llama_kv_cache_msa*>(memory)) return {sparse->get_base(), nullptr};
  return {dynamic_cast<llama_kv_cache*>(memory), nullptr};
}

/// Recurrent states; null when there are none.
inline llama_memory_recurrent* recurrent_of(llama_memory_i* memory) {
  if (auto* both = dynamic_cast<llama_memory_hybrid*>(memory)) return both->get_mem_recr();
  if (auto* both = dynamic_cast<llama_memory_hybrid_iswa*>(memory)) return both->get_mem_recr();
  return dynamic_cast<llama_memory_recurrent*>(memory);
}

}  // namespace llamatap::internals
