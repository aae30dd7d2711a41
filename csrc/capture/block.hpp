#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace llamatap {

/// Buffer for captured states; views share ownership. Aligned to 64 bytes, not initialised.
class Block {
 public:
  explicit Block(size_t bytes)
      : data_(static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, kAlignment))) {}

  std::byte* data() const { return data_.get(); }

 private:
  static constexpr std::align_val_t kAlignment{64};
  struct Free {
    void operator()(std::byte* data) const { ::operator delete(data, kAlignment); }
  };
  std::unique_ptr<std::byte, Free> data_;
};

}  // namespace llamatap
