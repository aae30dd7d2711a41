#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <utility>

namespace llamatap {

/// Buffer for captured states, not initialised; views share ownership.
class Block {
 public:
  /// Memory of the process, aligned to 64 bytes.
  explicit Block(size_t bytes);
  /// `release` is called with the memory when the block ends.
  Block(std::byte* data, size_t bytes, std::function<void(std::byte*)> release)
      : data_(data), bytes_(bytes), release_(std::move(release)) {}
  ~Block() { release_(data_); }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  std::byte* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  std::byte* data_;
  size_t bytes_;
  std::function<void(std::byte*)> release_;
};

}  // namespace llamatap
