#pragma once

#include <ggml-cpp.h>

#include <cstdint>
#include <map>
#include <string>
#include <variant>
#include <vector>

namespace llamatap {

using MetadataValue =
    std::variant<bool, int64_t, uint64_t, double, std::string, std::vector<bool>, std::vector<int64_t>,
                 std::vector<uint64_t>, std::vector<double>, std::vector<std::string>>;
using Metadata = std::map<std::string, MetadataValue>;

/// Header of a GGUF file: metadata and tensor offsets.
class GgufFile {
 public:
  /// Throws ModelLoadFailed when `path` is not a readable GGUF file.
  explicit GgufFile(const std::string& path);

  /// Without arrays of more than 1,024 elements (the vocabulary).
  Metadata metadata() const;

  /// Throws ModelLoadFailed for faults that the engine does not check and would crash on or compute nonsense
  /// from: weights that are outside of the file, empty or of a wrong type; norms and biases that are not
  /// float32; blocks beyond the block count; numbers that are not finite; a negative epsilon; a vocabulary
  /// without tokens. Also for a shard of a split model that is not the first, and for an EAGLE-3 file with
  /// tensors or settings that the engine's graph ignores. Checks the other shards too.
  void check() const;

  /// Whether a tensor's name starts with `prefix`; in this file of a split model.
  bool has_tensor(const std::string& prefix) const;

  /// This file; if it is the first of a split model, also the others.
  std::vector<std::string> parts() const;

 private:
  void check_first() const;
  void check_tensors(uint64_t n_blocks) const;
  /// The engine notices unknown weights only by their number, loads scales that it does not apply, and
  /// ignores unknown settings.
  void check_eagle3() const;
  void check_values(const std::string& arch) const;
  void check_vocabulary() const;
  int64_t find(const std::string& key, int type) const;
  std::string text(const std::string& key) const;
  uint64_t count(const std::string& key, uint64_t otherwise) const;
  [[noreturn]] void fail(const std::string& what) const;

  std::string path_;
  gguf_context_ptr file_;
};

}  // namespace llamatap
