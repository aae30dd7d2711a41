#include "engine/model/vocab.hpp"

#include <llama.h>

#include <limits>
#include <string_view>
#include <unordered_map>

#include "engine/abort.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

std::optional<int32_t> token_or_none(llama_token token) {
  if (token == LLAMA_TOKEN_NULL) return std::nullopt;
  return token;
}

int32_t checked_length(size_t length, const char* what) {
  if (length > static_cast<size_t>(std::numeric_limits<int32_t>::max()) / 8) {
    throw InvalidInput(std::string(what) + " is too long: " + std::to_string(length));
  }
  return static_cast<int32_t>(length);
}

/// Calls run(), which fills `buffer` or returns minus the size that it needs, and resizes the buffer.
template <typename Buffer, typename Run>
void fill(Buffer& buffer, const Run& run) {
  int32_t count = guarded("the tokenizer failed", run);
  if (count == std::numeric_limits<int32_t>::min()) throw InvalidInput("the text has too many tokens");
  if (count < 0) {
    buffer.resize(static_cast<size_t>(-count));
    count = guarded("the tokenizer failed", run);
  }
  buffer.resize(static_cast<size_t>(count));
}

}  // namespace

int32_t Vocab::size() const { return llama_vocab_n_tokens(vocab_); }

void Vocab::check(int32_t token) const {
  if (token < 0 || token >= size()) {
    throw InvalidInput("token id " + std::to_string(token) + " is outside of the vocabulary of " +
                       std::to_string(size()));
  }
}

bool Vocab::has_tokenizer() const { return llama_vocab_type(vocab_) != LLAMA_VOCAB_TYPE_NONE; }

void Vocab::require_tokenizer() const {
  if (!has_tokenizer()) {
    throw Unsupported("this file has no tokenizer; give token ids instead of text");
  }
}

std::vector<int32_t> Vocab::tokenize(const std::string& text, bool add_special, bool parse_special) const {
  require_tokenizer();
  const int32_t length = checked_length(text.size(), "the text");
  std::vector<int32_t> tokens(text.size() + 8);
  fill(tokens, [&] {
    return llama_tokenize(vocab_, text.data(), length, tokens.data(), static_cast<int32_t>(tokens.size()),
                          add_special, parse_special);
  });
  return tokens;
}

std::string Vocab::detokenize(const std::vector<int32_t>& tokens, bool remove_special,
                              bool unparse_special) const {
  require_tokenizer();
  for (const int32_t token : tokens) check(token);
  if (tokens.empty()) return {};
  const int32_t n_tokens = checked_length(tokens.size(), "the token list");
  std::string text(tokens.size() * 8 + 16, '\0');
  fill(text, [&] {
    return llama_detokenize(vocab_, tokens.data(), n_tokens, text.data(), static_cast<int32_t>(text.size()),
                            remove_special, unparse_special);
  });
  return text;
}

std::string Vocab::piece(int32_t token, bool special) const {
  require_tokenizer();
  check(token);
  std::string text(32, '\0');
  fill(text, [&] {
    return llama_token_to_piece(vocab_, token, text.data(), static_cast<int32_t>(text.size()), 0, special);
  });
  return text;
}

bool Vocab::is_end_of_generation(int32_t token) const {
  check(token);
  return llama_vocab_is_eog(vocab_, token);
}

bool Vocab::is_control(int32_t token) const {
  require_tokenizer();
  check(token);
  return llama_vocab_is_control(vocab_, token);
}

bool Vocab::adds_bos() const { return llama_vocab_get_add_bos(vocab_); }
bool Vocab::adds_eos() const { return llama_vocab_get_add_eos(vocab_); }
std::optional<int32_t> Vocab::bos() const { return token_or_none(llama_vocab_bos(vocab_)); }
std::optional<int32_t> Vocab::eos() const { return token_or_none(llama_vocab_eos(vocab_)); }
std::optional<int32_t> Vocab::mask() const { return token_or_none(llama_vocab_mask(vocab_)); }
std::optional<int32_t> Vocab::eot() const { return token_or_none(llama_vocab_eot(vocab_)); }

std::string Vocab::text(int32_t token) const {
  require_tokenizer();
  check(token);
  return llama_vocab_get_text(vocab_, token);
}

std::vector<std::optional<int32_t>> Vocab::find(const std::vector<std::string>& texts) const {
  require_tokenizer();
  std::unordered_map<std::string_view, std::optional<int32_t>> ids;
  for (const std::string& text : texts) ids.emplace(text, std::nullopt);
  for (int32_t token = 0; token < size(); ++token) {
    const auto found = ids.find(llama_vocab_get_text(vocab_, token));
    if (found != ids.end() && !found->second) found->second = token;
  }
  std::vector<std::optional<int32_t>> result;
  result.reserve(texts.size());
  for (const std::string& text : texts) result.push_back(ids.at(text));
  return result;
}

}  // namespace llamatap
