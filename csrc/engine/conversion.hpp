#pragma once

#include <string>

namespace llamatap {

/// A file without a name in any folder (Linux: in memory), which goes when this and its readers do.
class ScratchFile {
 public:
  /// Throws EngineFailed when there is no room for it.
  ScratchFile();
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  const std::string& path() const { return path_; }

 private:
  int descriptor_;
  std::string path_;
};

/// Write the model of `path` (with its other parts, if it is split) into `target`, its matrices as "f32",
/// "f16" or "bf16", rounded to nearest; vectors, norms and what else must be float32 stay. Throws
/// InvalidInput for another type, ModelLoadFailed for what the engine cannot convert.
void convert_weights(const std::string& path, const std::string& target, const std::string& type);

}  // namespace llamatap
