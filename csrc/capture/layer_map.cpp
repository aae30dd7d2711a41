#include "capture/layer_map.hpp"

#include <ggml.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <system_error>

#include "engine/error.hpp"

namespace llamatap {

namespace {

/// The block that a weight belongs to; -1 when `name` is no weight of a block ("blk.<i>.<...>").
int32_t block_of(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.";
  if (name.substr(0, kPrefix.size()) != kPrefix) return -1;
  name.remove_prefix(kPrefix.size());
  int32_t block = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), block);
  return error == std::errc() && end != name.data() + name.size() && *end == '.' ? block : -1;
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

}  // namespace

std::string_view original_name(const ggml_tensor* tensor) {
  const std::string_view name = tensor->name;
  const auto first = name.find('#');
  const auto last = name.rfind('#');
  return first != last ? name.substr(first + 1, last - first - 1) : name;
}

std::string given_name(const ggml_tensor* tensor) {
  if (tensor == nullptr) return {};
  const auto name = original_name(tensor);
  const bool numbered = name.rfind("node_", 0) == 0 || name.rfind("leaf_", 0) == 0;
  return numbered ? std::string() : std::string(name);
}

NodeSignature NodeSignature::of(const ggml_tensor& node) {
  return {given_name(&node), static_cast<int32_t>(node.op), given_name(node.src[0]), given_name(node.src[1])};
}

bool NodeSignature::matches(const ggml_tensor& node) const {
  return op == static_cast<int32_t>(node.op) && name == given_name(&node) &&
         source0 == given_name(node.src[0]) && source1 == given_name(node.src[1]);
}

StreamFinder::StreamFinder(int32_t n_layer, int64_t n_embd)
    : n_embd_(n_embd), chains_(static_cast<size_t>(n_layer) + 2) {}

void StreamFinder::reset() {
  for (auto& chain : chains_) chain.clear();
  nodes_.clear();
}

const ggml_tensor* StreamFinder::original(const ggml_tensor* tensor) const {
  if (!is_leaf(*tensor)) return tensor;
  const auto name = original_name(tensor);
  if (name == tensor->name) return tensor;
  const auto found = std::find_if(nodes_.rbegin(), nodes_.rend(),
                                  [&](const ggml_tensor* node) { return name == node->name; });
  return found != nodes_.rend() ? *found : tensor;
}

StreamFinder::Chain StreamFinder::trace(const ggml_tensor* node) const {
  Chain chain;
  while (node != nullptr) {
    node = original(node);
    if (node->type == GGML_TYPE_F32 && node->ne[0] == n_embd_ && node->ne[2] == 1 && node->ne[3] == 1) {
      chain.push_back(node);
    }
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
        return chain;
      default:
        return chain;
    }
  }
  return chain;
}

void StreamFinder::see(const ggml_tensor* node) {
  nodes_.push_back(node);
  const size_t last = chains_.size() - 2;
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    const ggml_tensor* weight = node->src[i];
    if (weight == nullptr || !is_leaf(*weight)) continue;
    const auto name = original_name(weight);
    const int32_t block = block_of(name);
    if (block >= 0 && static_cast<size_t>(block) < last) {
      if (!chains_[block].empty()) continue;
      if (const auto* data = data_source(*node, i)) chains_[block] = trace(data);
    } else if (name == "output_norm.weight") {
      if (chains_[last].empty()) {
        if (const auto* data = data_source(*node, i)) chains_[last] = trace(data);
      }
      chains_[last + 1] = {node};
    } else if (name == "output_norm.bias") {
      chains_[last + 1] = {node};
    }
  }
  if (chains_[last + 1].empty() && std::strcmp(node->name, "result_norm") == 0) see_norm(node);
}

void StreamFinder::see_norm(const ggml_tensor* node) {
  const size_t last = chains_.size() - 2;
  chains_[last + 1] = {node};
  // Its weight and bias, whatever they are called, are leaves.
  while ((node->op == GGML_OP_MUL || node->op == GGML_OP_ADD) && is_leaf(*node->src[1])) node = node->src[0];
  chains_[last] = trace(node);
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
  const auto readers = [&](const ggml_tensor* node) {
    int result = 0;
    for (int i = 0; i < count; ++i) {
      const auto& sources = ggml_graph_node(graph, i)->src;
      result += std::any_of(std::begin(sources), std::end(sources), [&](const ggml_tensor* source) {
        return source != nullptr && finder.original(source) == node;
      });
    }
    return result;
  };

  std::vector<LayerSource> sources;
  for (int32_t slot = 0; slot < n_layer + 2; ++slot) {
    const auto what = model->arch() + ": " +
                      (slot <= n_layer ? "layer " + std::to_string(slot) : std::string("the output norm"));
    const auto& chain = finder.chains()[slot];
    const ggml_tensor* stream = nullptr;
    for (const auto* node : chain) {
      // The stream is read by the block's norm and by its residual add; an embedding that is normed on
      // its way into the first block is not. After the last block only the output norm reads it.
      if (slot >= n_layer || readers(node) >= 2) stream = node;
    }
    if (stream == nullptr) {
      throw Unsupported(what + " is no single residual stream of [n_tokens, n_embd] in the engine's graph" +
                        (chain.empty() ? std::string() : " (" + std::string(chain.back()->name) + ")"));
    }
    if (stream->ne[1] != kOutputs && stream->ne[1] != kTokens) {
      throw Unsupported(what + " has not one row a token in the engine's graph (" + stream->name + ")");
    }
    LayerSource source{NodeSignature::of(*stream), stream->ne[1] == kOutputs};
    int matches = 0;
    for (int i = 0; i < count; ++i) matches += source.node.matches(*ggml_graph_node(graph, i)) ? 1 : 0;
    if (matches != 1) {
      throw Unsupported(what + " cannot be told from other nodes of the engine's graph (" + stream->name +
                        ")");
    }
    sources.push_back(std::move(source));
  }
  return std::shared_ptr<const LayerMap>(
      new LayerMap(std::move(sources), model->n_embd(), context.has_memory()));
}

}  // namespace llamatap
