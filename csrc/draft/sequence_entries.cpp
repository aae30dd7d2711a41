#include "draft/sequence_entries.hpp"

#include <algorithm>
#include <cmath>
#include <string>

#include "engine/error.hpp"

namespace llamatap {

std::map<int32_t, std::vector<int32_t>> entries_by_sequence(const Batch& batch) {
  if (!batch.has_tokens() || batch.has_embeddings()) {
    throw InvalidInput("the drafter needs token ids; this batch holds embeddings");
  }
  std::map<int32_t, std::vector<int32_t>> entries;
  for (int32_t row = 0; row < batch.size(); ++row) {
    for (const int32_t seq : batch.sequences()[row]) entries[seq].push_back(row);
  }
  for (auto& [seq, rows] : entries) {
    std::stable_sort(rows.begin(), rows.end(),
                     [&](int32_t a, int32_t b) { return batch.positions()[a] < batch.positions()[b]; });
  }
  return entries;
}

void check_contiguous(const Batch& batch, const std::vector<int32_t>& rows) {
  for (size_t i = 1; i < rows.size(); ++i) {
    const int32_t expected = batch.positions()[rows[i - 1]] + 1;
    if (batch.positions()[rows[i]] == expected) continue;
    throw InvalidInput("position " + std::to_string(expected) + " is missing or occurs twice in the batch");
  }
}

bool all_finite(const float* values, size_t n) {
  return std::all_of(values, values + n, [](float value) { return std::isfinite(value); });
}

}  // namespace llamatap
