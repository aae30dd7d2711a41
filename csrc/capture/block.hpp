#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>
#include <string>

namespace llamatap {

enum class DType { f32, f16, bf16 };

inline size_t item_size(DType dtype) { return dtype == DType::f32 ? 4 : 2; }

/// Converts `count` float32 values to `dtype` (round to nearest, ties to even) and writes them.
void write_values(const float* values, size_t count, DType dtype, std::byte* target);

/// Memory of our own that states are captured into; every view on it shares it and the last one frees
/// it. Aligned to 64 bytes, not initialised.
class Block {
 public:
  explicit Block(size_t bytes);

  std::byte* data() const { return data_.get(); }
  size_t size() const { return size_; }

 private:
  struct Free {
    void operator()(std::byte* data) const;
  };
  std::unique_ptr<std::byte, Free> data_;
  size_t size_;
};

}  // namespace llamatap
