#pragma once

#include <cstdint>
#include <functional>

#include "engine/context/batch.hpp"
#include "engine/context/batch_rules.hpp"

namespace llamatap {

/// Throws InvalidInput (entry, expected, found) unless the context can compute the batch. `last(seq)`: the
/// last position of a sequence in memory, or -1; not called without a memory.
void check_batch(const Batch& batch, const BatchRules& rules, const std::function<int32_t(int32_t)>& last);

}  // namespace llamatap
