#include <doctest/doctest.h>
#include <ggml-cpp.h>

#include <cstdint>
#include <string>
#include <vector>

#include "capture/residual_streams.hpp"
#include "engine/context/graph.hpp"

namespace llamatap {

namespace {

constexpr int64_t kEmbd = 8;
constexpr int64_t kTokens = 5;
constexpr int32_t kBlocks = 2;

/// A graph of a transformer with two blocks, built without computing anything. Its nodes have default names.
class TinyGraph {
 public:
  TinyGraph() : context_(ggml_init({size_t{1} << 20, nullptr, /*no_alloc=*/true})) {
    graph_ = ggml_new_graph(get());
  }

  ggml_context* get() const { return context_.get(); }

  ggml_tensor* weight(const std::string& name, int64_t rows = 1) {
    return ggml_set_name(ggml_new_tensor_2d(get(), GGML_TYPE_F32, kEmbd, rows), name.c_str());
  }
  ggml_tensor* ids(int64_t n = kTokens) { return ggml_new_tensor_1d(get(), GGML_TYPE_I32, n); }
  ggml_tensor* embeddings() { return ggml_get_rows(get(), weight("token_embd.weight", 32), ids()); }
  ggml_tensor* norm(ggml_tensor* input, const std::string& name) {
    return ggml_mul(get(), ggml_rms_norm(get(), input, 1e-5F), weight(name));
  }

  /// norm, product, residual add; twice. `outputs`: rows to keep after attention.
  ggml_tensor* block(int32_t i, ggml_tensor* input, ggml_tensor* outputs = nullptr) {
    const std::string name = "blk." + std::to_string(i) + ".";
    auto* branch =
        ggml_mul_mat(get(), weight(name + "attn_q.weight", kEmbd), norm(input, name + "attn_norm.weight"));
    auto* residual = input;
    if (outputs != nullptr) {
      branch = ggml_get_rows(get(), branch, outputs);
      residual = ggml_get_rows(get(), residual, outputs);
    }
    auto* middle = ggml_add(get(), branch, residual);
    auto* fed =
        ggml_mul_mat(get(), weight(name + "ffn.weight", kEmbd), norm(middle, name + "ffn_norm.weight"));
    return ggml_add(get(), fed, middle);
  }

  ggml_tensor* output_norm(ggml_tensor* input) { return norm(input, "output_norm.weight"); }

  ResidualStreams streams(ggml_tensor* result, const ggml_tensor* embeddings = nullptr,
                          const std::vector<ggml_tensor*>& hooks = {},
                          const std::vector<LayerSource>* known = nullptr) {
    hooks_ = hooks;
    ggml_build_forward_expand(graph_, result);
    const Graph view(graph_, nullptr, embeddings, /*has_logits=*/false, &hooks_);
    return {view, kBlocks, kEmbd, known};
  }

 private:
  ggml_context_ptr context_;
  ggml_cgraph* graph_;
  std::vector<ggml_tensor*> hooks_;
};

using Nodes = std::vector<const ggml_tensor*>;

}  // namespace

TEST_CASE("the residual stream is what norm and residual add of each block read") {
  TinyGraph graph;
  auto* h0 = graph.embeddings();
  auto* h1 = graph.block(0, h0);
  auto* h2 = graph.block(1, h1);
  auto* result = graph.output_norm(h2);
  const auto streams = graph.streams(result);
  CHECK(streams.by_slot() == Nodes{h0, h1, h2, result});
  CHECK_FALSE(streams.ends_without_norm());
}

TEST_CASE("names of nodes do not matter") {
  TinyGraph graph;
  auto* h0 = graph.embeddings();
  auto* h1 = graph.block(0, h0);
  auto* h2 = graph.block(1, h1);
  ggml_set_name(h0, "l_out-0");
  ggml_set_name(h1, "l_out-1");
  CHECK(graph.streams(graph.output_norm(h2)).by_slot()[1] == h1);
}

TEST_CASE("H_0 is the embedding as it enters the first block") {
  TinyGraph graph;
  auto* h0 = ggml_scale(graph.get(), graph.embeddings(), 3);
  const auto streams = graph.streams(graph.output_norm(graph.block(1, graph.block(0, h0))));
  CHECK(streams.by_slot()[0] == h0);
}

TEST_CASE("the stream is found behind a norm without weights") {
  TinyGraph graph;
  auto* h0 = graph.embeddings();
  auto* h1 = graph.block(0, h0);
  // Block 1 adds to h1, and reads it through another norm first.
  auto* product = ggml_mul_mat(graph.get(), graph.weight("blk.1.attn_q.weight", kEmbd),
                               ggml_rms_norm(graph.get(), h1, 1e-5F));
  auto* h2 = ggml_add(graph.get(), product, h1);
  CHECK(graph.streams(graph.output_norm(h2)).by_slot()[1] == h1);
}

TEST_CASE("the input of block 0 is not taken for that of block 1") {
  TinyGraph graph;
  auto* h0 = graph.embeddings();
  auto* both = ggml_add(graph.get(), graph.block(0, h0), graph.block(1, h0));
  const auto streams = graph.streams(graph.output_norm(both));
  CHECK(streams.by_slot()[0] == h0);
  CHECK(streams.by_slot()[1] == nullptr);
}

TEST_CASE("the last block is cropped behind its input") {
  TinyGraph graph;
  auto* h0 = graph.embeddings();
  auto* h1 = graph.block(0, h0);
  auto* h2 = graph.block(1, h1, graph.ids(2));
  const auto streams = graph.streams(graph.output_norm(h2));
  CHECK(streams.by_slot()[1] == h1);
  CHECK(streams.by_slot()[2] == h2);
  CHECK(streams.by_slot()[2]->ne[1] == 2);
}

TEST_CASE("the stream is found behind a crop before the output norm") {
  TinyGraph graph;
  auto* h2 = graph.block(1, graph.block(0, graph.embeddings()));
  auto* cropped = ggml_get_rows(graph.get(), h2, graph.ids(2));
  CHECK(graph.streams(graph.output_norm(cropped)).by_slot()[2] == h2);
}

TEST_CASE("a stream that one node reads alone needs the engine's hook") {
  for (const bool hooked : {false, true}) {
    TinyGraph graph;
    auto* h0 = graph.embeddings();
    auto* h1 = graph.block(0, h0);
    // Block 1 adds to its norm's output, not to its input.
    auto* normed = graph.norm(h1, "blk.1.attn_norm.weight");
    auto* h2 = ggml_add(graph.get(), ggml_silu(graph.get(), normed), normed);
    auto* result = graph.output_norm(h2);
    const auto streams = graph.streams(
        result, nullptr, hooked ? std::vector<ggml_tensor*>{h0, h1} : std::vector<ggml_tensor*>{});
    CHECK(streams.by_slot()[1] == (hooked ? h1 : nullptr));
    CHECK(streams.nearest(1) != nullptr);
  }
}

TEST_CASE("several streams are not one") {
  TinyGraph graph;
  auto* one = graph.embeddings();
  auto* several = ggml_repeat_4d(graph.get(), one, kEmbd, kTokens, 4, 1);
  auto* normed = graph.norm(several, "blk.0.attn_norm.weight");
  auto* h1 = ggml_add(graph.get(), normed, several);
  auto* h2 = ggml_add(graph.get(), graph.norm(h1, "blk.1.attn_norm.weight"), h1);
  const auto streams = graph.streams(graph.output_norm(h2));
  CHECK(streams.by_slot()[0] == nullptr);
  CHECK(streams.by_slot()[2] == nullptr);
}

TEST_CASE("a part of several streams is not one either") {
  TinyGraph graph;
  auto* all = ggml_repeat_4d(graph.get(), graph.embeddings(), kEmbd, kTokens, 4, 1);
  auto* part = ggml_view_2d(graph.get(), all, kEmbd, kTokens, all->nb[1], 0);
  const auto streams = graph.streams(graph.output_norm(graph.block(1, graph.block(0, part))));
  CHECK(streams.by_slot()[0] == nullptr);
}

TEST_CASE("in encoders whose blocks end in norms, H_n is the result of the last block") {
  TinyGraph graph;
  auto* h1 = graph.block(0, graph.embeddings());
  auto* h2 = graph.norm(graph.block(1, h1), "blk.1.layer_out_norm.weight");
  const auto streams = graph.streams(h2, h2);
  CHECK(streams.ends_without_norm());
  CHECK(streams.by_slot() == Nodes{streams.by_slot()[0], h1, h2, nullptr});
}

TEST_CASE("later graphs must have the nodes that were found first") {
  TinyGraph graph;
  auto* h0 = graph.embeddings();
  auto* h1 = ggml_set_name(graph.block(0, h0), "l_out-0");
  auto* h2 = ggml_set_name(graph.block(1, h1), "l_out-1");
  const std::vector<LayerSource> known{{"embd"}, {"l_out-0"}, {"other"}, {"result_norm"}};
  const auto streams = graph.streams(graph.output_norm(h2), nullptr, {}, &known);
  CHECK(streams.by_slot()[1] == h1);
  CHECK(streams.by_slot()[2] == nullptr);
}

TEST_CASE("nodes without a name are named by their operation") {
  TinyGraph graph;
  auto* node = ggml_scale(graph.get(), graph.embeddings(), 2);
  ggml_set_name(node, "node_7");
  CHECK(node_name(*node) == "(SCALE)");
  ggml_set_name(node, "inp_scaled");
  CHECK(node_name(*node) == "inp_scaled");
}

}  // namespace llamatap
