// The program expects its back ends to be linked in; the package's are loaded at run time.
#include <ggml-backend.h>

#include <filesystem>

namespace {

bool load_cpu() {
  for (const auto& entry : std::filesystem::directory_iterator(ENGINE_LIBRARIES)) {
    const auto name = entry.path().filename().string();
    if (name.rfind("libllamatap-ggml-cpu", 0) != 0) continue;
    if (ggml_backend_load(entry.path().c_str()) != nullptr) return true;
  }
  return false;
}

const bool loaded = load_cpu();

}  // namespace
