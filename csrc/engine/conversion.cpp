#include "engine/conversion.hpp"

#include <llama.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <system_error>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"

namespace llamatap {

namespace {

llama_ftype file_type(const std::string& type) {
  if (type == "f32") return LLAMA_FTYPE_ALL_F32;
  if (type == "f16") return LLAMA_FTYPE_MOSTLY_F16;
  if (type == "bf16") return LLAMA_FTYPE_MOSTLY_BF16;
  throw InvalidInput("weights must be \"f32\", \"f16\" or \"bf16\", not \"" + type + "\"");
}

}  // namespace

ScratchFile::ScratchFile() {
#ifdef __linux__
  descriptor_ = memfd_create("llamatap", MFD_CLOEXEC);
  path_ = "/proc/self/fd/" + std::to_string(descriptor_);
#else
  path_ = (std::filesystem::temp_directory_path() / "llamatap-XXXXXX").string();
  descriptor_ = mkstemp(path_.data());
#endif
  if (descriptor_ < 0) {
    throw EngineFailed("no room for the converted weights: " +
                       std::error_code(errno, std::generic_category()).message());
  }
}

ScratchFile::~ScratchFile() {
#ifndef __linux__
  unlink(path_.c_str());
#endif
  close(descriptor_);
}

void convert_weights(const std::string& path, const std::string& target, const std::string& type) {
  auto params = llama_model_quantize_default_params();
  params.ftype = file_type(type);
  params.allow_requantize = true;
  // The engine pads what it writes to 32 bytes, whatever the file says of itself.
  std::array<llama_model_kv_override, 2> overrides{};
  overrides[0].tag = LLAMA_KV_OVERRIDE_TYPE_INT;
  std::string("general.alignment").copy(overrides[0].key, sizeof(overrides[0].key) - 1);
  overrides[0].val_i64 = 32;
  params.kv_overrides = overrides.data();
  const LogScope log;
  const AbortGuard guard;
  std::string reason;
  try {
    if (llama_model_quantize(path.c_str(), target.c_str(), &params) == 0) return;
    reason = log.text();
  } catch (const std::exception& error) {
    reason = error.what();
  }
  throw ModelLoadFailed("cannot convert the weights of " + path + ": " + reason);
}

}  // namespace llamatap
