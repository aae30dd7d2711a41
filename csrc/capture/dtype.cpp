#include "capture/dtype.hpp"

#include <ggml.h>

#include <cstdint>
#include <cstring>

namespace llamatap {

void write_values(const float* values, size_t count, DType dtype, std::byte* target) {
  const auto n = static_cast<int64_t>(count);
  switch (dtype) {
    case DType::f32: std::memcpy(target, values, count * sizeof(float)); break;
    case DType::f16: ggml_fp32_to_fp16_row(values, reinterpret_cast<ggml_fp16_t*>(target), n); break;
    case DType::bf16: ggml_fp32_to_bf16_row(values, reinterpret_cast<ggml_bf16_t*>(target), n); break;
  }
}

}  // namespace llamatap
