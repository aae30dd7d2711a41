#include "engine/memory_size.hpp"

#include <array>
#include <cmath>
#include <cstdio>

namespace llamatap {

std::string size_text(double bytes) {
  constexpr double kMebi = 1 << 20;
  constexpr double kGibi = 1 << 30;
  std::array<char, 32> text{};
  if (bytes < kGibi) {
    std::snprintf(text.data(), text.size(), "%.0f MiB", std::ceil(bytes / kMebi));
  } else {
    std::snprintf(text.data(), text.size(), "%.2f GiB", bytes / kGibi);
  }
  return text.data();
}

bool says_no_memory(const std::string& message) {
  return message.find("failed to allocate") != std::string::npos ||
         message.find("unable to allocate") != std::string::npos;
}

}  // namespace llamatap
