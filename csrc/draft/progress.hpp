#pragma once

#include <cstdint>
#include <vector>

#include "draft/draft_request.hpp"

namespace llamatap {

/// Target positions that a drafter has processed in a sequence.
struct Progress {
  int32_t next = 0;         // next position
  int32_t batch_start = 0;  // first position of the last batch

  /// Throws InvalidInput unless a batch from `first` continues the sequence; positions from `earliest` on may
  /// be replaced.
  void check_start(int32_t seq, int32_t first, int32_t earliest) const;
  void begin_batch(int32_t first, int32_t n);
  /// Keeps the first entry of the last batch and the `n` drafted tokens after it. Throws InvalidInput when
  /// the batch had fewer.
  void accept(int32_t seq, int32_t n);
};

/// Throws InvalidInput when two requests are for the same sequence.
void check_requests(const std::vector<DraftRequest>& requests);

/// Throws InvalidInput unless the request's position follows the last processed one.
void check_position(const DraftRequest& request, const Progress& progress);

}  // namespace llamatap
