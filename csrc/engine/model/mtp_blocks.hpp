#pragma once

#include <string>

namespace llamatap {

/// Inputs and outputs of an architecture's MTP blocks, from the engine's src/models/*.cpp (check again with
/// each engine bump).
struct MtpBlocks {
  bool pre_norm = false;        // take the target's state before its final norm
  bool crops_states = false;    // only outputs have a state; else all rows, in order
  bool borrows_memory = false;  // attend to the target's KV cache, have none of their own
};

inline MtpBlocks mtp_blocks(const std::string& arch) {
  if (arch == "mimo2" || arch == "step35") return {true, true, false};
  if (arch == "qwen3next" || arch == "nemotron_h_moe") return {false, true, false};
  if (arch == "gemma4-assistant") return {false, true, true};
  return {};
}

}  // namespace llamatap
