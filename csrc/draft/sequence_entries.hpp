#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "engine/context/batch.hpp"

namespace llamatap {

/// Rows of a token batch, grouped by sequence, sorted by position. Throws InvalidInput for another kind of
/// batch.
std::map<int32_t, std::vector<int32_t>> entries_by_sequence(const Batch& batch);

/// Throws InvalidInput unless the positions of these rows are consecutive.
void check_contiguous(const Batch& batch, const std::vector<int32_t>& rows);

/// Whether n values are finite. NaN in a shared KV cache would reach unrelated sequences.
bool all_finite(const float* values, size_t n);

}  // namespace llamatap
