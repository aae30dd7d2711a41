#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

namespace llamatap {

/// Unnamed temporary file (Linux: in memory); deleted when this and its readers close it.
class ScratchFile {
 public:
  /// Throws EngineFailed when the system cannot create one.
  ScratchFile();
  ~ScratchFile();
  ScratchFile(const ScratchFile&) = delete;
  ScratchFile& operator=(const ScratchFile&) = delete;

  /// Path for this process.
  const std::string& path() const { return path_; }
  /// Throws EngineFailed when there is no room.
  void write(const void* data, size_t size);

 private:
  int descriptor_;
  std::string path_;
};

/// Progress of a conversion, 0..0.5 (loading is the rest), and the request to stop.
struct ConversionProgress {
  std::atomic<float>& fraction;
  const std::atomic<bool>& stop;
};

/// Writes the model of these files (the parts of a split one, in order) to `target`, with all weights that
/// are not float32 converted to `type` ("f32", "f16" or "bf16"), rounded to nearest. Throws InvalidInput for
/// another type and for weights beyond float16, ModelLoadFailed for unreadable files, OutOfMemory when the
/// result exceeds `available` bytes (0: no limit), Interrupted.
void convert_weights(const std::vector<std::string>& paths, const std::string& type, uint64_t available,
                     ScratchFile& target, const ConversionProgress& progress);

}  // namespace llamatap
