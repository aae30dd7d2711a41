#pragma once

#include <string>
#include <vector>

#include "engine/model/model_options.hpp"

namespace llamatap {

/// Throws OutOfMemory when the weights of these files (the parts of a split model) need more memory than is
/// available. Mapped weights need none: their pages can be dropped and read again. (Some types the CPU keeps
/// in an order of its own, which is a copy.)
void require_model_memory(const std::vector<std::string>& paths, const ModelOptions& options);

}  // namespace llamatap
