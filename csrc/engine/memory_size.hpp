#pragma once

#include <string>

namespace llamatap {

/// Bytes for a message: "12 MiB", "1.25 GiB".
std::string size_text(double bytes);

/// Whether the engine's words say that it failed because it got no memory.
bool says_no_memory(const std::string& message);

}  // namespace llamatap
