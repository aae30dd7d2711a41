#pragma once

#include <cstddef>

namespace llamatap {

enum class DType { f32, f16, bf16 };

inline size_t item_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

/// Converts `count` float32 values to `dtype` (round to nearest, ties to even) and writes them.
void write_values(const float* values, size_t count, DType dtype, std::byte* target);

}  // namespace llamatap
