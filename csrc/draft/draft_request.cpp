#include "draft/draft_request.hpp"

#include <set>
#include <string>

#include "engine/error.hpp"

namespace llamatap {

void check_requests(const std::vector<DraftRequest>& requests) {
  std::set<int32_t> seen;
  for (const auto& request : requests) {
    if (seen.insert(request.seq).second) continue;
    throw InvalidInput("sequence " + std::to_string(request.seq) + " is asked for twice");
  }
}

}  // namespace llamatap
