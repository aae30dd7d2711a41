#include "capture/block.hpp"

#include <new>

namespace llamatap {

namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Block::Block(size_t bytes)
    : Block(static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, kAlignment)), bytes,
            [](std::byte* data) { ::operator delete(data, kAlignment); }) {}

}  // namespace llamatap
