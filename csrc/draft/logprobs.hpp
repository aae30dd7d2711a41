#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/context.hpp"

namespace llamatap {

/// Log-probabilities (log-softmax of logits), by row.
struct Logprobs {
  int32_t n_top = 0;                 // alternatives in each row
  std::vector<double> chosen;        // of each row's token
  std::vector<int32_t> top;          // [rows, n_top]: the most likely ids, descending; ties by ascending id
  std::vector<double> top_logprobs;  // [rows, n_top]
};

/// Adds a row: the log-probabilities of `token` and of the `n_top` most likely tokens (n_vocab at most).
/// Throws NotFinite when the logits hold NaN or infinity, InvalidInput for an unknown token.
void add_logprobs(const float* logits, int32_t n_vocab, int32_t token, int32_t n_top, Logprobs& result);

/// The log-probabilities of tokens at the outputs `first_row`, `first_row` + 1, ... of the last batch, one
/// token per output.
Logprobs logprobs(const Context& context, int32_t first_row, const std::vector<int32_t>& tokens,
                  int32_t n_top);

}  // namespace llamatap
