#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/context.hpp"

namespace llamatap {

/// Log-probabilities of a softmax over logits, by row.
struct Logprobs {
  int32_t n_top = 0;           // of each row
  std::vector<double> chosen;  // of its token
  std::vector<int32_t> top;    // [rows, n_top]: the most likely ids, falling; of equals, the smaller first
  std::vector<double> top_logprobs;  // [rows, n_top]
};

/// Adds a row: of `token`, and of the `n_top` most likely ones (of all, where that is more). Throws NotFinite
/// when the logits hold NaN or infinity, InvalidInput when there is no such token.
void add_logprobs(const float* logits, int32_t n_vocab, int32_t token, int32_t n_top, Logprobs& result);

/// The log-probabilities of tokens, each at its own output of the last batch: `first_row`,
/// `first_row` + 1, ...
Logprobs logprobs(const Context& context, int32_t first_row, const std::vector<int32_t>& tokens,
                  int32_t n_top);

}  // namespace llamatap
