#include "capture/layer_map.hpp"

#include <ggml.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "engine/error.hpp"

namespace llamatap {

namespace {

/// The block that a weight belongs to; -1 when `name` is no weight of a block ("blk.<i>.<...>").
int32_t block_of(const char* name) {
  if (std::strncmp(name, "blk.", 4) != 0) return -1;
  char* end = nullptr;
  const long block = std::strtol(name + 4, &end, 10);
  return end != name + 4 && *end == '.' ? static_cast<int32_t>(block) : -1;
}

bool is_leaf(const ggml_tensor& tensor) { return tensor.op == GGML_OP_NONE; }

/// What `node` reads beside the weight in its source `weight`; null for a look-up in the weight.
const ggml_tensor* data_source(const ggml_tensor& node, int weight) {
  if (node.op == GGML_OP_GET_ROWS && weight == 0) return nullptr;
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    if (i != weight && node.src[i] != nullptr && node.src[i]->type == GGML_TYPE_F32) return node.src[i];
  }
  return nullptr;
}

const char* name_or_empty(const ggml_tensor* tensor) { return tensor == nullptr ? "" : tensor->name; }

}  // namespace

NodeSignature NodeSignature::of(const ggml_tensor& node) {
  return {node.name, static_cast<int32_t>(node.op), name_or_empty(node.src[0]), name_or_empty(node.src[1])};
}

bool NodeSignature::matches(const ggml_tensor& node) const {
  return name == node.name && op == static_cast<int32_t>(node.op) && source0 == name_or_empty(node.src[0]) &&
         source1 == name_or_empty(node.src[1]);
}

StreamFinder::StreamFinder(int32_t n_layer, int64_t n_embd)
    : n_embd_(n_embd), found_(static_cast<size_t>(n_layer) + 2, nullptr) {}

void StreamFinder::reset() { std::fill(found_.begin(), found_.end(), nullptr); }

const ggml_tensor* StreamFinder::trace(const ggml_tensor* node) const {
  const ggml_tensor* stream = nullptr;
  while (node != nullptr) {
    if (node->ne[0] == n_embd_ && node->ne[2] == 1 && node->ne[3] == 1) stream = node;
    switch (node->op) {
      case GGML_OP_NORM:
      case GGML_OP_RMS_NORM:
      case GGML_OP_L2_NORM:
      case GGML_OP_RESHAPE:
      case GGML_OP_VIEW:
      case GGML_OP_CONT:
        node = node->src[0];
        continue;
      case GGML_OP_GET_ROWS:
        // The crop to the outputs, which some architectures do after the last block.
        if (!is_leaf(*node->src[0]) && node->src[1]->type == GGML_TYPE_I32 && is_leaf(*node->src[1])) {
          node = node->src[0];
          continue;
        }
        return stream;
      default:
        return stream;
    }
  }
  return stream;
}

void StreamFinder::see(const ggml_tensor* node) {
  const size_t last = found_.size() - 2;
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    const ggml_tensor* weight = node->src[i];
    if (weight == nullptr || !is_leaf(*weight)) continue;
    const int32_t block = block_of(weight->name);
    if (block >= 0 && static_cast<size_t>(block) < last) {
      auto& input = found_[block];
      if (input != nullptr) continue;
      if (const auto* data = data_source(*node, i)) input = trace(data);
    } else if (std::strcmp(weight->name, "output_norm.weight") == 0) {
      if (found_[last] == nullptr) {
        if (const auto* data = data_source(*node, i)) found_[last] = trace(data);
      }
      found_[last + 1] = node;
    } else if (std::strcmp(weight->name, "output_norm.bias") == 0) {
      found_[last + 1] = node;
    }
  }
}

std::shared_ptr<const LayerMap> LayerMap::resolve(const std::shared_ptr<Model>& model) {
  constexpr uint32_t kTokens = 8;
  constexpr uint32_t kOutputs = 3;
  ContextOptions options;
  options.n_ctx = 256;
  options.n_batch = kTokens;
  options.n_ubatch = kTokens;
  Context context(model, options);
  ggml_cgraph* graph = context.reserve_graph(kTokens, kOutputs);

  const int32_t n_layer = model->n_layer();
  StreamFinder finder(n_layer, model->n_embd());
  const int count = ggml_graph_n_nodes(graph);
  for (int i = 0; i < count; ++i) finder.see(ggml_graph_node(graph, i));

  std::vector<LayerSource> sources;
  for (int32_t slot = 0; slot < n_layer + 2; ++slot) {
    const auto* node = finder.found()[slot];
    const auto what = model->arch() + ": " +
                      (slot <= n_layer ? "layer " + std::to_string(slot) : std::string("the output norm")) + " ";
    if (node == nullptr) {
      throw Unsupported(what + "has no residual stream of [n_tokens, n_embd] in the engine's graph");
    }
    LayerSource source{NodeSignature::of(*node), node->ne[1] == kOutputs};
    if (node->type != GGML_TYPE_F32 || (node->ne[1] != kOutputs && node->ne[1] != kTokens)) {
      throw Unsupported(what + "is not float32 with one row a token in the engine's graph (" + node->name + ")");
    }
    int matches = 0;
    for (int i = 0; i < count; ++i) matches += source.node.matches(*ggml_graph_node(graph, i)) ? 1 : 0;
    if (matches != 1) {
      throw Unsupported(what + "cannot be told from other nodes of the engine's graph (" + node->name + ")");
    }
    sources.push_back(std::move(source));
  }
  return std::shared_ptr<const LayerMap>(new LayerMap(std::move(sources), model->n_embd()));
}

}  // namespace llamatap
