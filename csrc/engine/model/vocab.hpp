#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

struct llama_vocab;

namespace llamatap {

/// Vocabulary and tokenizer of a model. Valid as long as the model; thread-safe.
class Vocab {
 public:
  explicit Vocab(const llama_vocab* vocab) : vocab_(vocab) {}

  int32_t size() const;
  /// Whether the file has a tokenizer; without one there are only token ids.
  bool has_tokenizer() const;
  /// Throws Unsupported for a file without a tokenizer.
  std::vector<int32_t> tokenize(const std::string& text, bool add_special, bool parse_special) const;
  /// The bytes of `tokens`, not necessarily valid UTF-8.
  std::string detokenize(const std::vector<int32_t>& tokens, bool remove_special, bool unparse_special) const;
  /// The bytes of one token.
  std::string piece(int32_t token, bool special) const;
  bool is_end_of_generation(int32_t token) const;
  bool is_control(int32_t token) const;
  bool adds_bos() const;
  bool adds_eos() const;
  std::optional<int32_t> bos() const;
  std::optional<int32_t> eos() const;
  std::optional<int32_t> eot() const;
  std::optional<int32_t> mask() const;
  /// The text of a token, as spelled in the file.
  std::string text(int32_t token) const;
  /// For each text: the first token with exactly this spelling in the file.
  std::vector<std::optional<int32_t>> find(const std::vector<std::string>& texts) const;
  /// Throws InvalidInput unless 0 <= token < size().
  void check(int32_t token) const;

 private:
  void require_tokenizer() const;
  const llama_vocab* vocab_;
};

}  // namespace llamatap
