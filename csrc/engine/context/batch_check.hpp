#pragma once

#include <cstdint>
#include <functional>

#include "engine/context/batch.hpp"
#include "engine/context/batch_rules.hpp"

namespace llamatap {

/// Throws InvalidInput, with the entry and what was expected, unless the context can compute the batch.
/// `last(seq)`: the last position of a sequence in memory, -1 without one; asked only where there is a
/// memory.
void check_batch(const Batch& batch, const BatchRules& rules, const std::function<int32_t(int32_t)>& last);

}  // namespace llamatap
