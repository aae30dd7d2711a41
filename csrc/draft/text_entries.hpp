#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "draft/progress.hpp"
#include "draft/sequence_entries.hpp"

namespace llamatap {

/// Rows of a batch as entries_by_sequence() gives them, for a drafter that keeps the whole text of each
/// sequence (with its `progress`), so that any part of it may be replaced. Throws InvalidInput unless each
/// sequence's rows are consecutive and continue its text; no sequence is changed then.
template <typename Sequence>
std::map<int32_t, std::vector<int32_t>> entries_of_texts(const Batch& batch,
                                                         const std::map<int32_t, Sequence>& sequences) {
  auto entries = entries_by_sequence(batch);
  for (const auto& [seq, rows] : entries) {
    check_contiguous(batch, rows);
    const auto found = sequences.find(seq);
    const auto progress = found == sequences.end() ? Progress() : found->second.progress;
    progress.check_start(seq, batch.positions()[rows.front()], 0);
  }
  return entries;
}

}  // namespace llamatap
