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
  /// Converts weights other than float32 to "f32", "f16" or "bf16"; none: no conversion.
  std::optional<std::string> weights;
  /// Bytes of memory that the process can still allocate; 0: do not check the weights against it.
  uint64_t memory_available = 0;
};

}  // namespace llamatap
