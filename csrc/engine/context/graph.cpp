#include "engine/context/graph.hpp"

#include <ggml.h>

#include <string>
#include <string_view>

#include "engine/private/engine_context.hpp"

namespace llamatap {

int32_t Graph::size() const { return ggml_graph_n_nodes(graph_); }

const ggml_tensor* Graph::node(int32_t index) const { return ggml_graph_node(graph_, index); }

int32_t Graph::readers(const ggml_tensor* tensor) const { return internals::use_count(graph_, tensor); }

const ggml_tensor* Graph::original(const ggml_tensor* tensor) const {
  if (tensor->op != GGML_OP_NONE) return tensor;
  const std::string_view name = tensor->name;
  const auto first = name.find('#');
  const auto last = name.rfind('#');
  if (first == last) return tensor;
  const std::string copied(name.substr(first + 1, last - first - 1));
  // Nodes first: an input that nothing reads may bear the name of a node that was computed ("inp_embd").
  for (int32_t i = 0; i < size(); ++i) {
    if (copied == node(i)->name) return node(i);
  }
  const ggml_tensor* input = ggml_graph_get_tensor(graph_, copied.c_str());
  return input == nullptr ? tensor : input;
}

const ggml_tensor* Graph::hooked_input(int32_t block) const {
  return static_cast<size_t>(block) < layer_inputs_->size() ? (*layer_inputs_)[block] : nullptr;
}

}  // namespace llamatap
