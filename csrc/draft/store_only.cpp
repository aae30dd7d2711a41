#include "draft/store_only.hpp"

#include <ggml.h>

namespace llamatap {

void StoreOnly::begin_graph(const Graph& graph) {
  last_store_ = nullptr;
  for (int32_t i = 0; i < graph.size(); ++i) {
    const ggml_tensor* node = graph.node(i);
    if (node->op == GGML_OP_SET_ROWS) last_store_ = node;
    // A store after attention belongs to another block, or does not go to the KV cache.
    if (node->op == GGML_OP_FLASH_ATTN_EXT || node->op == GGML_OP_SOFT_MAX) return;
  }
  last_store_ = nullptr;
}

}  // namespace llamatap
