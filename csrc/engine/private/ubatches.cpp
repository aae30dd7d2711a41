#include "engine/private/ubatches.hpp"

#include <utility>

#include "engine/private/caches.hpp"
#include "llama-batch.h"
#include "llama-context.h"
#include "llama-model.h"

namespace {

// Names in an explicit instantiation are exempt from access checks.
std::vector<uint32_t>& search_heads(llama_kv_cache& cache);

template <auto Member>
struct ReachHeads {
  friend std::vector<uint32_t>& search_heads(llama_kv_cache& cache) { return cache.*Member; }
};
template struct ReachHeads<&llama_kv_cache::v_heads>;

/// Restores the cell where each cache starts to search for free ones. Planning a batch of several streams
/// mixes up their start cells; with sliding windows, tokens would then be overwritten too early.
class SearchHeads {
 public:
  explicit SearchHeads(llama_memory_i* memory) {
    for (auto* cache : llamatap::internals::caches_of(memory).list())
      kept_.emplace_back(cache, search_heads(*cache));
  }
  ~SearchHeads() {
    for (auto& [cache, heads] : kept_) search_heads(*cache) = heads;
  }
  SearchHeads(const SearchHeads&) = delete;
  SearchHeads& operator=(const SearchHeads&) = delete;

 private:
  std::vector<std::pair<llama_kv_cache*, std::vector<uint32_t>>> kept_;
};

}  // namespace

namespace llamatap::internals {

std::optional<std::vector<std::vector<int32_t>>> ubatches(llama_context* context, const llama_batch& batch) {
  const auto& model = context->get_model();
  llama_batch_allocr splitter(model.hparams.n_pos_per_embd());
  const llama_batch_compat compat(context, batch);
  if (!splitter.init(*compat.batch_ext, model.vocab, false)) return std::nullopt;
  const SearchHeads heads(context->get_memory());
  // init_batch() only plans; the memory changes in apply(), which is not called here.
  const auto plan =
      context->get_memory()->init_batch(splitter, context->get_cparams().n_ubatch, /*embd_all=*/false);
  if (!plan || plan->get_status() != LLAMA_MEMORY_STATUS_SUCCESS) return std::nullopt;
  std::vector<std::vector<int32_t>> ubatches;
  do {
    ubatches.push_back(plan->get_ubatch().data->batch_idxs);
  } while (plan->next());
  return ubatches;
}

}  // namespace llamatap::internals
