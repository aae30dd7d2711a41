#include "capture/block.hpp"

#include <ggml.h>

#include <cstring>

namespace llamatap {

namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

void write_values(const float* values, size_t count, DType dtype, std::byte* target) {
  const auto n = static_cast<int64_t>(count);
  switch (dtype) {
    case DType::f32:
      std::memcpy(target, values, count * sizeof(float));
      break;
    case DType::f16:
      ggml_fp32_to_fp16_row(values, reinterpret_cast<ggml_fp16_t*>(target), n);
      break;
    case DType::bf16:
      ggml_fp32_to_bf16_row(values, reinterpret_cast<ggml_bf16_t*>(target), n);
      break;
  }
}

Block::Block(size_t bytes)
    : data_(static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, kAlignment))), size_(bytes) {}

void Block::Free::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

}  // namespace llamatap
