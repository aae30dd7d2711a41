#include "capture/layer_map.hpp"

#include <ggml.h>

#include <string>

#include "engine/error.hpp"

namespace llamatap {

std::shared_ptr<const LayerMap> LayerMap::resolve(const std::shared_ptr<Model>& model) {
  // Row counts that no other dimension of a graph is likely to have.
  constexpr uint32_t kTokens = 11;
  constexpr uint32_t kOutputs = 5;
  ContextOptions options;
  options.n_ctx = 256;
  options.n_batch = kTokens;
  options.n_ubatch = kTokens;
  Context context(model, options);
  const Graph graph = context.reserve_graph(kTokens, kOutputs);
  const int32_t n_layer = model->n_layer();
  const ResidualStreams streams(graph, n_layer, model->n_embd(), nullptr);

  std::vector<LayerSource> sources;
  for (int32_t slot = 0; slot < n_layer + 2; ++slot) {
    const auto what = model->arch() + ": " +
                      (slot <= n_layer ? "layer " + std::to_string(slot) : std::string("the output norm"));
    const ggml_tensor* stream = streams.by_slot()[slot];
    if (slot > n_layer && streams.ends_without_norm()) {
      sources.push_back({"", false});
      continue;
    }
    if (stream == nullptr) {
      const ggml_tensor* nearest = streams.nearest(slot);
      throw Unsupported(what + " is no single residual stream of [n_tokens, n_embd] in the engine's graph" +
                        (nearest == nullptr ? std::string() : " (" + node_name(*nearest) + ")"));
    }
    if (stream->ne[1] != kOutputs && stream->ne[1] != kTokens) {
      throw Unsupported(what + " does not have one row per token in the engine's graph (" +
                        node_name(*stream) + ")");
    }
    const bool cropped = stream->ne[1] == kOutputs;
    // The engine does not fill the hooks of encoders.
    const bool hooked =
        slot < n_layer && !cropped && context.has_memory() && graph.hooked_input(slot) == stream;
    sources.push_back({node_name(*stream), cropped, hooked});
  }
  return std::shared_ptr<const LayerMap>(
      new LayerMap(std::move(sources), model->n_embd(), context, !streams.ends_without_norm()));
}

}  // namespace llamatap
