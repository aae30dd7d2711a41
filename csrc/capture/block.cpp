#include "capture/block.hpp"

namespace llamatap {

namespace {

constexpr std::align_val_t kAlignment{64};

}  // namespace

Block::Block(size_t bytes)
    : data_(static_cast<std::byte*>(::operator new(bytes == 0 ? 1 : bytes, kAlignment))), size_(bytes) {}

void Block::Free::operator()(std::byte* data) const { ::operator delete(data, kAlignment); }

}  // namespace llamatap
