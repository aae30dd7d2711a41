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

/// The header of a GGUF file: its metadata, and where which tensor lies.
class GgufFile {
 public:
  /// Throws ModelLoadFailed when `path` is no readable GGUF file.
  explicit GgufFile(const std::string& path);

  /// Arrays of more than 1,024 elements (the vocabulary) are left out.
  Metadata metadata() const;

  /// Throws ModelLoadFailed for what the engine takes for granted and would crash on, or compute nonsense
  /// from: weights outside of the file, empty or of a type that is none for weights, norms and biases that
  /// are not float32, blocks beyond the block count, numbers that are not finite, a negative epsilon, a
  /// vocabulary without tokens; for a shard of a split model that is not the first; and for an EAGLE-3 file
  /// with more than the engine's graph computes with. The other files of a split model are checked too.
  void check() const;

  /// Whether it has a tensor whose name begins so. Of a split model: in this part.
  bool has_tensor(const std::string& prefix) const;

  /// This file, and where it is the first of a split model, the others.
  std::vector<std::string> parts() const;

 private:
  void check_first() const;
  void check_tensors(uint64_t n_blocks) const;
  /// The engine refuses weights that it does not know by their number alone, loads scales that it does not
  /// multiply with, and does not look at settings that it does not know.
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
