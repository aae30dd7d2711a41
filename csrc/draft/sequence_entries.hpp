#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "engine/context/batch.hpp"

namespace llamatap {

/// The entries of a batch of tokens by sequence, each in the order of their positions. Throws InvalidInput
/// for another kind of batch.
std::map<int32_t, std::vector<int32_t>> entries_by_sequence(const Batch& batch);

/// Throws InvalidInput unless the positions of these entries, in their order, have no gap.
void check_contiguous(const Batch& batch, const std::vector<int32_t>& rows);

/// Whether n values are finite. NaN in a shared memory would reach unrelated sequences.
bool all_finite(const float* values, size_t n);

}  // namespace llamatap
