#pragma once

#include <string>
#include <vector>

#include "engine/model/model_options.hpp"

namespace llamatap {

/// Throws OutOfMemory when the weights of these files (the parts of a split model) need more memory than is
/// available. Mapped weights need none, as their pages can be read again, except types that the CPU back end
/// repacks into a copy.
void require_model_memory(const std::vector<std::string>& paths, const ModelOptions& options);

}  // namespace llamatap
