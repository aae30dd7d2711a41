#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace llamatap {

/// Buffer for captured states; views share ownership. Aligned to 64 bytes, not initialised.
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
