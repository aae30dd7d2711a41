#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace llamatap {

/// A file without a name (Linux: in memory), which goes when this and its readers do.
class ScratchFile {
 public:
  /// Throws EngineFailed when the system gives none.
  ScratchFile();
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  /// How this process opens it.
  const std::string& path() const { return path_; }
  /// Throws EngineFailed when there is no room.
  void write(const void* data, size_t size);

 private:
  int descriptor_;
  std::string path_;
};

/// How far a conversion is, in 0..0.5 (what follows is the loading), and whether it shall end.
struct ConversionProgress {
  std::atomic<float>& fraction;
  const std::atomic<bool>& stop;
};

/// Write the model of these files (the parts of a split one, in order) into `target`: all weights that are
/// not float32 as `type` ("f32", "f16" or "bf16"), rounded to nearest, and the rest as it is. Throws
/// InvalidInput for another type and for weights beyond float16, ModelLoadFailed for what cannot be read,
/// OutOfMemory when they take more than `available` bytes (0: any number may be taken), Interrupted.
void convert_weights(const std::vector<std::string>& paths, const std::string& type, uint64_t available,
                     ScratchFile& target, const ConversionProgress& progress);

}  // namespace llamatap
