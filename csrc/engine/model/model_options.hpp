#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace llamatap {

struct ModelOptions {
  int32_t n_gpu_layers = 0;
  bool use_mmap = true;
  bool load_mtp = false;
  bool vocab_only = false;
  /// The type that weights other than float32 are converted to: "f32", "f16" or "bf16"; none: not converted.
  std::optional<std::string> weights;
  /// Bytes of the machine's memory that the process can still take; 0: the weights are not checked against
  /// it.
  uint64_t memory_available = 0;
};

}  // namespace llamatap
