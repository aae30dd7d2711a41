#pragma once

#include <ggml.h>

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <string>
#include <vector>

#include "engine/context/graph.hpp"

struct llama_context;
class llm_graph_result;

namespace llamatap::internals {

/// Gets rows of a copy, [count, matrices, width]. They are there when the engine call ends.
using FetchRows = std::function<void(std::byte* target, size_t row, size_t count)>;

/// Matrices to copy from each graph; none without its functions.
struct CopyWishes {
  std::string key;  // tells copies of one kind from those of another
  ggml_type type = GGML_TYPE_F32;
  /// In groups of matrices with as many rows, from a graph that was built and is not computed yet.
  std::function<std::vector<std::vector<const ggml_tensor*>>(const Graph&)> wanted;
  /// Called for each group with its number of rows once their computation has begun.
  std::function<void(size_t group, size_t count, const FetchRows&)> fetch;

  bool any() const { return wanted != nullptr; }
};

/// Copies of states that nodes in the engine's graphs make (vendor/patches/0002). The engine builds a graph,
/// here copies are added to it, and it is cut off behind them when nothing else is wanted. Once the device
/// has begun to compute, the copies are fetched, in the order of its stream: nothing waits between nodes, and
/// the engine builds the next graph meanwhile.
class GraphCopies {
 public:
  /// Sets up the next engine call. `may_stop`: nothing is wanted but the copies.
  void watch(llama_context* context, CopyWishes wishes, bool may_stop);
  /// Nodes of the graphs of the last engine call.
  int64_t nodes() const { return nodes_; }
  /// Rethrows what the wishes' functions threw in the engine call.
  void rethrow();

 private:
  void add(llm_graph_result& result) noexcept;
  void fetch(const llm_graph_result& result) noexcept;

  llama_context* context_ = nullptr;
  CopyWishes wishes_;
  bool may_stop_ = false;
  int64_t nodes_ = 0;
  std::string key_;                   // of the graph that the engine may use again
  std::vector<ggml_tensor*> groups_;  // [width, columns, rows]; null: without rows
  std::exception_ptr error_;
};

}  // namespace llamatap::internals
