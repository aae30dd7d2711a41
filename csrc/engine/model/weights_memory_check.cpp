#include "engine/model/weights_memory_check.hpp"

#include <filesystem>
#include <system_error>

#include "engine/error.hpp"
#include "engine/memory_size.hpp"
#include "engine/model/model.hpp"
#include "engine/private/footprint.hpp"

namespace llamatap {

void require_model_memory(const std::vector<std::string>& paths, const ModelOptions& options) {
  uint64_t total = 0;
  for (const auto& path : paths) {
    std::error_code error;
    const auto bytes = std::filesystem::file_size(path, error);
    if (!error) total += bytes;
  }
  if (total <= options.memory_available) return;
  const auto model = Model::without_weights(paths.front(), options);
  if (!model) return;
  const auto footprint = internals::weights_footprint(model.get());
  const uint64_t needed = footprint.host - (options.use_mmap ? footprint.mapped : 0);
  if (needed <= options.memory_available) return;
  const bool can_map = !options.use_mmap && footprint.mapped > 0;
  throw OutOfMemory("the weights of " + paths.front() + " take " + size_text(static_cast<double>(needed)) +
                    " of memory, and " + size_text(static_cast<double>(options.memory_available)) +
                    " are available; use a file of a smaller type" +
                    (can_map ? ", or map it (use_mmap=True)" : ""));
}

}  // namespace llamatap
