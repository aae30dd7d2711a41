#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <vector>

#include "engine/context/decode_observer.hpp"

struct llama_context;
class llm_graph_result;

namespace llamatap::internals {

/// Copies of states that nodes in the engine's graphs make (vendor/patches/0002). The engine builds a graph,
/// here copies are added to it, and it is cut off behind them when nothing else is wanted. Once the device
/// has begun to compute, the copies are fetched, in the order of its stream: nothing waits between nodes, and
/// the engine builds the next graph meanwhile.
class GraphCopies {
 public:
  /// Sets up the next engine call. `observer`: null for none. Throws nothing.
  void watch(llama_context* context, DecodeObserver* observer, bool may_stop);
  /// Nodes of the graphs of the last engine call.
  int64_t nodes() const { return nodes_; }
  /// Rethrows what the observer threw in the engine call.
  void rethrow();

 private:
  void add(llm_graph_result& result) noexcept;
  void fetch(const llm_graph_result& result) noexcept;

  llama_context* context_ = nullptr;
  DecodeObserver* observer_ = nullptr;
  bool may_stop_ = false;
  int64_t nodes_ = 0;
  std::string key_;                   // of the graph that the engine may use again
  std::vector<ggml_tensor*> groups_;  // [width, columns, rows]; null: without rows
  std::exception_ptr error_;
};

}  // namespace llamatap::internals
