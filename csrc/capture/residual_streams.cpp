#include "capture/residual_streams.hpp"

#include <ggml.h>

#include <algorithm>
#include <charconv>
#include <string_view>
#include <system_error>

namespace llamatap {

namespace {

bool is_leaf(const ggml_tensor& tensor) { return tensor.op == GGML_OP_NONE; }

/// Parses all of `text` as a number; -1 on failure.
int32_t number(std::string_view text) {
  int32_t value = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() ? value : -1;
}

/// The name of a weight without the marks of a copy on another back end ("CUDA0#name#0") and of an encoder
/// ("enc.blk.0.attn_norm.weight").
std::string_view weight_name(std::string_view name) {
  const auto first = name.find('#');
  const auto last = name.rfind('#');
  if (first != last) name = name.substr(first + 1, last - first - 1);
  constexpr std::string_view kEncoder = "enc.";
  return name.substr(0, kEncoder.size()) == kEncoder ? name.substr(kEncoder.size()) : name;
}

/// The block of a weight "blk.<i>.<...>"; -1 for other names.
int32_t block_of_weight(std::string_view name) {
  constexpr std::string_view kPrefix = "blk.";
  if (name.substr(0, kPrefix.size()) != kPrefix) return -1;
  name.remove_prefix(kPrefix.size());
  const auto dot = name.find('.');
  return dot == std::string_view::npos ? -1 : number(name.substr(0, dot));
}

/// The block of a node "<...>-<i>"; -1 for other names.
int32_t block_of_node(std::string_view name) {
  const auto dash = name.rfind('-');
  return dash == std::string_view::npos ? -1 : number(name.substr(dash + 1));
}

/// The float32 source of `node` besides the source number `weight`; null when the node looks up rows of the
/// weight by ids.
const ggml_tensor* data_source(const ggml_tensor& node, int weight) {
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    if (i != weight && node.src[i] != nullptr && node.src[i]->type == GGML_TYPE_F32) return node.src[i];
  }
  return nullptr;
}

/// The input of a reshape, a crop to the outputs or a norm without weights; null for other nodes.
const ggml_tensor* behind(const ggml_tensor& node) {
  switch (node.op) {
    case GGML_OP_NORM:
    case GGML_OP_RMS_NORM:
    case GGML_OP_L2_NORM:
    case GGML_OP_RESHAPE:
    case GGML_OP_VIEW:
    case GGML_OP_CONT: return node.src[0];
    case GGML_OP_GET_ROWS:
      if (is_leaf(*node.src[0]) || node.src[1]->type != GGML_TYPE_I32 || !is_leaf(*node.src[1]))
        return nullptr;
      return node.src[0];
    default: return nullptr;
  }
}

/// Whether a node is one of several streams (gemma3n).
bool is_part(const ggml_tensor& node) {
  return node.op == GGML_OP_VIEW && ggml_nelements(&node) != ggml_nelements(node.src[0]);
}

}  // namespace

std::string node_name(const ggml_tensor& node) {
  const std::string name = node.name;
  const bool numbered = name.rfind("node_", 0) == 0 || name.rfind("leaf_", 0) == 0;
  return numbered ? std::string("(") + ggml_op_name(node.op) + ")" : name;
}

ResidualStreams::ResidualStreams(const Graph& graph, int32_t n_layer, int32_t n_embd,
                                 const std::vector<LayerSource>* known)
    : graph_(graph),
      n_layer_(n_layer),
      n_embd_(n_embd),
      known_(known),
      first_weights_(static_cast<size_t>(n_layer), nullptr),
      found_(static_cast<size_t>(n_layer) + 2, nullptr),
      nearest_(found_.size(), nullptr),
      parts_read_(static_cast<size_t>(n_layer), false) {
  for (int32_t i = 0; i < graph_.size(); ++i) visit(i);

  const auto before = [](const BlockStart& a, const BlockStart& b) { return a.block < b.block; };
  const bool once_each =
      std::is_sorted(starts_.begin(), starts_.end(), before) &&
      std::find(first_weights_.begin(), first_weights_.end(), nullptr) == first_weights_.end();
  if (!once_each) visit_names();

  std::vector<int32_t> first_nodes(static_cast<size_t>(n_layer), -1);
  for (const auto& start : starts_) {
    if (first_nodes[start.block] < 0) first_nodes[start.block] = start.node;
    if (found_[start.block] != nullptr || parts_read_[start.block]) continue;
    visit_block(start, start.block > 0 ? first_nodes[start.block - 1] : -1);
  }
  if (nearest_[n_layer] == nullptr) visit_embeddings();
}

void ResidualStreams::visit(int32_t index) {
  const ggml_tensor& node = *graph_.node(index);
  for (int i = 0; i < GGML_MAX_SRC; ++i) {
    const ggml_tensor* weight = node.src[i];
    if (weight == nullptr || !is_leaf(*weight)) continue;
    const auto name = weight_name(weight->name);
    if (const int32_t block = block_of_weight(name); block >= 0) {
      if (block >= n_layer_) continue;
      const ggml_tensor* read = data_source(node, i);
      if (first_weights_[block] == nullptr && read != nullptr) first_weights_[block] = weight;
      if (first_weights_[block] == weight && read != nullptr) starts_.push_back({block, index, read});
    } else if (name == "output_norm.weight" || name == "output_norm.bias") {
      visit_output_norm(node, data_source(node, i));
    }
  }
  if (nearest_[n_layer_] == nullptr && std::string_view(node.name) == "result_norm") {
    // Its weight and bias are leaves, whatever their names.
    const auto* read = &node;
    while ((read->op == GGML_OP_MUL || read->op == GGML_OP_ADD) && is_leaf(*read->src[1]))
      read = read->src[0];
    visit_output_norm(node, read);
  }
}

void ResidualStreams::visit_names() {
  starts_.clear();
  std::vector<bool> started(static_cast<size_t>(n_layer_), false);
  for (int32_t i = 0; i < graph_.size(); ++i) {
    const ggml_tensor& node = *graph_.node(i);
    const int32_t block = block_of_node(node.name);
    if (block < 0 || block >= n_layer_ || started[block]) continue;
    started[block] = true;
    starts_.push_back({block, i, node.src[0]});
  }
}

void ResidualStreams::visit_block(const BlockStart& start, int32_t previous) {
  const auto computed_since = [&](const ggml_tensor* node) {
    for (int32_t i = start.node - 1; i > previous; --i) {
      if (graph_.node(i) == node) return true;
    }
    return previous < 0;
  };
  const ggml_tensor* hooked = graph_.hooked_input(start.block);
  bool reshaped = false;
  for (const auto* node = start.read; node != nullptr; node = behind(*node)) {
    node = graph_.original(node);
    if (node->ne[0] == n_embd_ && is_part(*node)) parts_read_[start.block] = true;
    // Usually norm and residual add both read the stream, perhaps through one reshape (rwkv). Where the add
    // reads the norm's result, only the engine's hook confirms the stream.
    const bool read_twice = graph_.readers(node) >= 2 || node == hooked || reshaped;
    reshaped = read_twice && node->op == GGML_OP_RESHAPE;
    if (!is_stream(start.block, *node)) continue;
    if (nearest_[start.block] == nullptr) nearest_[start.block] = node;
    if (read_twice && computed_since(node)) found_[start.block] = node;
  }
}

void ResidualStreams::visit_output_norm(const ggml_tensor& norm, const ggml_tensor* read) {
  found_[n_layer_ + 1] = nearest_[n_layer_ + 1] = &norm;
  if (nearest_[n_layer_] != nullptr) return;
  // After the last block, only the norm reads the stream.
  for (const auto* node = read; node != nullptr; node = behind(*node)) {
    node = graph_.original(node);
    if (!is_stream(n_layer_, *node)) continue;
    if (nearest_[n_layer_] == nullptr) nearest_[n_layer_] = node;
    found_[n_layer_] = node;
  }
}

void ResidualStreams::visit_embeddings() {
  const ggml_tensor* result = graph_.embeddings();
  if (result == nullptr || graph_.readers(result) > 0 || !is_stream(n_layer_, *result)) return;
  // Expect the weight and bias of the norm that ends the last block.
  bool ends_block = false;
  for (const auto* node = result; node->op == GGML_OP_MUL || node->op == GGML_OP_ADD; node = node->src[0]) {
    if (!is_leaf(*node->src[1])) break;
    ends_block = block_of_weight(weight_name(node->src[1]->name)) == n_layer_ - 1;
    if (!ends_block) break;
  }
  if (!ends_block) return;
  found_[n_layer_] = nearest_[n_layer_] = result;
  ends_without_norm_ = true;
}

bool ResidualStreams::is_stream(int32_t slot, const ggml_tensor& node) const {
  // Embeddings in place of tokens enter by another node.
  if (known_ != nullptr && slot > 0 && (*known_)[slot].node != node_name(node)) return false;
  // One of several streams does not count, except the text part of wider input embeddings (deepstack).
  const bool part = is_part(node) && !(slot == 0 && &node == graph_.input_embeddings());
  return node.type == GGML_TYPE_F32 && node.ne[0] == n_embd_ && node.ne[2] == 1 && node.ne[3] == 1 && !part;
}

}  // namespace llamatap
