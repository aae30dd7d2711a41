#pragma once

#include <cstdint>

#include "draft/draft_request.hpp"

namespace llamatap {

/// How far a drafter has followed a sequence, in positions of the target.
struct Progress {
  int32_t next = 0;         // the position that comes next
  int32_t batch_start = 0;  // the first position of the last batch

  /// Throws InvalidInput unless entries from `first` on follow. Entries from `earliest` on may be taken back
  /// by processing others in their place.
  void check_start(int32_t seq, int32_t first, int32_t earliest) const;
  void begin_batch(int32_t first, int32_t n);
  /// Keeps the first entry of the last batch and `n` drafted tokens after it, and discards the rest. Throws
  /// InvalidInput when there are fewer.
  void accept(int32_t seq, int32_t n);
};

/// Throws InvalidInput unless the last token follows what was processed.
void check_position(const DraftRequest& request, const Progress& progress);

}  // namespace llamatap
