#include "engine/private/graph_copies.hpp"

#include <ggml-backend.h>

#include <algorithm>
#include <utility>

#include "engine/abort.hpp"
#include "engine/private/engine_context.hpp"
#include "ggml-impl.h"
#include "llama-context.h"
#include "llama-graph.h"

namespace llamatap::internals {

namespace {

/// The index behind which a node can read `tensor`: -1 for a leaf.
int index_of(const ggml_cgraph& graph, const ggml_tensor* tensor) {
  ggml_tensor** end = graph.nodes + graph.n_nodes;
  ggml_tensor** found = std::find(graph.nodes, end, tensor);
  return found == end ? -1 : static_cast<int>(found - graph.nodes);
}

bool is_read(const ggml_cgraph& graph, const ggml_tensor* leaf) {
  return std::any_of(graph.nodes, graph.nodes + graph.n_nodes, [&](const ggml_tensor* node) {
    return node->view_src == leaf ||
           std::find(node->src, node->src + GGML_MAX_SRC, leaf) != node->src + GGML_MAX_SRC;
  });
}

/// Adds a node and the ones that it needs right behind `source`.
void insert_behind(ggml_cgraph& graph, const ggml_tensor* source, ggml_tensor* node) {
  const int before = graph.n_nodes;
  const int index = index_of(graph, source);
  ggml_build_forward_expand(&graph, node);
  std::rotate(graph.nodes + index + 1, graph.nodes + before, graph.nodes + graph.n_nodes);
}

}  // namespace

void GraphCopies::watch(llama_context* context, CopyWishes wishes, bool may_stop) {
  context_ = context;
  wishes_ = std::move(wishes);
  may_stop_ = may_stop;
  nodes_ = 0;
  const std::string key = wishes_.any() ? wishes_.key + (may_stop ? " stop" : "") : "";
  // A graph with other copies must not be used again; one that stops is built anew, under the guard.
  if (std::exchange(key_, key) != key || (wishes_.any() && may_stop)) context->forget_graph();
  if (!wishes_.any()) {
    context->on_graph_built = nullptr;
    context->on_graph_begun = nullptr;
    return;
  }
  context->on_graph_built = [this](llm_graph_result& result) { add(result); };
  context->on_graph_begun = [this](llm_graph_result& result, const llama_ubatch&) { fetch(result); };
}

void GraphCopies::rethrow() {
  if (error_) {
    key_.clear();
    context_->forget_graph();
    std::rethrow_exception(std::exchange(error_, nullptr));
  }
}

void GraphCopies::add(llm_graph_result& result) noexcept {
  AbortGuard::suspend();
  groups_.clear();
  try {
    ggml_cgraph& graph = *result.get_gf();
    ggml_context* memory = result.get_ctx();
    ggml_backend_sched_t sched = context_->get_sched();
    std::vector<const ggml_tensor*> last_wanted;
    for (const auto& wanted : wishes_.wanted(graph_of(result))) {
      groups_.push_back(nullptr);
      if (wanted.empty()) continue;
      if (wanted.front()->ne[1] == 0) {
        // Without outputs in this ubatch. What lies before is computed all the same: it fills the memory.
        last_wanted.insert(last_wanted.end(), wanted.begin(), wanted.end());
        continue;
      }
      const ggml_tensor& first = *wanted.front();
      ggml_tensor* all = ggml_new_tensor_3d(memory, wishes_.type, first.ne[0],
                                            static_cast<int64_t>(wanted.size()), first.ne[1]);
      ggml_set_output(all);
      ggml_backend_sched_set_tensor_backend(sched, all, ggml_backend_sched_get_backend(sched, 0));
      groups_.back() = all;
      for (size_t column = 0; column < wanted.size(); ++column) {
        auto* source = const_cast<ggml_tensor*>(wanted[column]);
        ggml_tensor* target =
            ggml_view_2d(memory, all, all->ne[0], all->ne[2], all->nb[2], column * all->nb[1]);
        ggml_tensor* copy = ggml_cpy(memory, source, target);
        insert_behind(graph, source, copy);
        last_wanted.push_back(copy);
      }
    }
    if (!may_stop_) return;
    int last = -1;
    for (const auto* node : last_wanted) last = std::max(index_of(graph, node), last);
    graph.n_nodes = last + 1;
    // The scheduler places a leaf where its readers are, and has no place for one without.
    ggml_backend_t host = ggml_backend_sched_get_backend(sched, ggml_backend_sched_get_n_backends(sched) - 1);
    for (int i = 0; i < graph.n_leafs; ++i) {
      ggml_tensor* leaf = graph.leafs[i];
      if (leaf->buffer == nullptr && leaf->view_src == nullptr && !is_read(graph, leaf)) {
        ggml_backend_sched_set_tensor_backend(sched, leaf, host);
      }
    }
    result.t_logits = result.t_embd = result.t_embd_pooled = result.t_h_nextn = nullptr;
  } catch (...) {
    error_ = std::current_exception();
  }
}

void GraphCopies::fetch(const llm_graph_result& result) noexcept {
  nodes_ += result.get_gf()->n_nodes;
  if (error_) return;
  try {
    for (size_t i = 0; i < groups_.size(); ++i) {
      ggml_tensor* all = groups_[i];
      if (all == nullptr) continue;
      ggml_backend_t backend = ggml_backend_sched_get_tensor_backend(context_->get_sched(), all);
      wishes_.fetch(i, static_cast<size_t>(all->ne[2]), [&](std::byte* target, size_t row, size_t count) {
        ggml_backend_tensor_get_async(backend, all, target, row * all->nb[2], count * all->nb[2]);
      });
    }
  } catch (...) {
    error_ = std::current_exception();
  }
}

}  // namespace llamatap::internals
