#pragma once

#include <string>

namespace llamatap {

/// Inputs and outputs of an architecture's MTP blocks in the engine's graph (read from its src/models/*.cpp;
/// check again with each engine bump).
struct MtpBlocks {
  bool pre_norm = false;        // they take the target's state before its final norm, as their training did
  bool crops_states = false;    // only outputs have a state; elsewhere all rows, in their order
  bool borrows_memory = false;  // they attend to the target's memory and have none of their own
};

inline MtpBlocks mtp_blocks(const std::string& arch) {
  if (arch == "mimo2" || arch == "step35") return {true, true, false};
  if (arch == "qwen3next" || arch == "nemotron_h_moe") return {false, true, false};
  if (arch == "gemma4-assistant") return {false, true, true};
  return {};
}

}  // namespace llamatap
