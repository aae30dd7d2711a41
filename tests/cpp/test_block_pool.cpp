#include <doctest/doctest.h>

#include <cstddef>
#include <memory>
#include <vector>

#include "capture/block_pool.hpp"

namespace llamatap {

namespace {

constexpr size_t kPage = 4096;

struct Counted {
  std::vector<size_t> allocated;
  size_t freed = 0;

  std::shared_ptr<BlockPool> pool(size_t most_bytes) {
    return std::make_shared<BlockPool>(most_bytes, [this](size_t bytes) {
      allocated.push_back(bytes);
      auto* data = new std::byte[bytes];
      return std::make_unique<Block>(data, bytes, [this](std::byte* memory) {
        ++freed;
        delete[] memory;
      });
    });
  }
};

}  // namespace

TEST_CASE("a block that ended is used again") {
  Counted counted;
  const auto pool = counted.pool(100 * kPage);
  const std::byte* first = nullptr;
  {
    const auto block = pool->take(5000);
    first = block->data();
    CHECK(pool->idle_bytes() == 0);
    CHECK(pool->take(5000)->data() != first);
  }
  CHECK(pool->idle_bytes() == 4 * kPage);
  CHECK(counted.allocated == std::vector<size_t>{2 * kPage, 2 * kPage});
  const auto one = pool->take(6000);
  const auto other = pool->take(1);
  CHECK(counted.allocated.size() == 2);
  CHECK((one->data() == first || other->data() == first));
  CHECK(counted.freed == 0);
}

TEST_CASE("the smallest block that is large enough is taken, unless it is much too large") {
  Counted counted;
  const auto pool = counted.pool(100 * kPage);
  {
    const std::vector<std::shared_ptr<Block>> blocks{pool->take(8 * kPage), pool->take(4 * kPage)};
  }
  CHECK(pool->take(3 * kPage)->bytes() == 4 * kPage);
  CHECK(pool->take(5 * kPage)->bytes() == 8 * kPage);
  // Neither of them may be half empty.
  CHECK(pool->take(kPage)->bytes() == kPage);
  CHECK(pool->take(9 * kPage)->bytes() == 9 * kPage);
  CHECK(counted.allocated.size() == 4);
}

TEST_CASE("blocks that nobody holds are bounded, and the oldest are freed") {
  Counted counted;
  const auto pool = counted.pool(10 * kPage);
  std::vector<std::shared_ptr<Block>> held;
  for (const size_t pages : {6, 3, 4}) held.push_back(pool->take(pages * kPage));
  for (auto& block : held) block.reset();
  // 6 and 3 fit, with 4 the oldest goes.
  CHECK(counted.freed == 1);
  CHECK(pool->idle_bytes() == 7 * kPage);
  // One that does not fit drives out no others.
  pool->take(50 * kPage).reset();
  CHECK(pool->idle_bytes() == 7 * kPage);
  CHECK(counted.freed == 2);
}

TEST_CASE("a block outlives its pool") {
  Counted counted;
  auto pool = counted.pool(10 * kPage);
  auto block = pool->take(100);
  pool.reset();
  block->data()[99] = std::byte{7};
  block.reset();
  CHECK(counted.freed == 1);
}

}  // namespace llamatap
