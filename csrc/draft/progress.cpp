#include "draft/progress.hpp"

#include <algorithm>
#include <set>
#include <string>

#include "engine/error.hpp"

namespace llamatap {

void Progress::check_start(int32_t seq, int32_t first, int32_t earliest) const {
  if (first == next || (first >= earliest && first < next)) return;
  throw InvalidInput("sequence " + std::to_string(seq) + " continues at position " + std::to_string(next) +
                     ", not " + std::to_string(first) +
                     "; a drafter must process every batch of a sequence, from position 0, or be reset");
}

void Progress::begin_batch(int32_t first, int32_t n) {
  batch_start = first;
  next = first + n;
}

void Progress::accept(int32_t seq, int32_t n) {
  const int32_t n_entries = std::max(0, next - batch_start);
  if (n < 0 || n >= n_entries) {
    throw InvalidInput("sequence " + std::to_string(seq) + " had " + std::to_string(n_entries) +
                       " entries in the last batch; the first and " + std::to_string(n) +
                       " more cannot be accepted");
  }
  next = batch_start + n + 1;
}

void check_requests(const std::vector<DraftRequest>& requests) {
  std::set<int32_t> seen;
  for (const auto& request : requests) {
    if (seen.insert(request.seq).second) continue;
    throw InvalidInput("sequence " + std::to_string(request.seq) +
                       " has two requests; give one per sequence");
  }
}

void check_position(const DraftRequest& request, const Progress& progress) {
  if (request.position == progress.next && progress.next > 0) return;
  throw InvalidInput("sequence " + std::to_string(request.seq) + ": the last token must be at position " +
                     std::to_string(progress.next) + ", after the processed ones, not " +
                     std::to_string(request.position));
}

}  // namespace llamatap
