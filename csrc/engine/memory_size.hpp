#pragma once

#include <string>

namespace llamatap {

/// A number of bytes for messages: "12 MiB", "1.25 GiB".
std::string size_text(double bytes);

/// Whether an engine message reports a failed allocation.
bool says_no_memory(const std::string& message);

}  // namespace llamatap
