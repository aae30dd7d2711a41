#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace llamatap {

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
