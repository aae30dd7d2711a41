#pragma once

#include <cstdint>
#include <vector>

#include "draft/drafter.hpp"
#include "engine/context/context.hpp"
#include "engine/sampler.hpp"

namespace llamatap {

/// The result of verifying a draft.
struct Verified {
  std::vector<int32_t> tokens;  // the accepted drafted tokens, and one more
  int32_t n_accepted = 0;
};

/// Tokens that end a text.
struct Stops {
  bool end_of_generation = true;
  std::vector<int32_t> tokens;
};

/// Samples the target's next tokens with the whole sampler chain, as long as they equal the draft's: the
/// output is that of sampling without a draft, token for token. The entries first_row, first_row + 1, ... of
/// the context's last batch are the token before the draft, then its tokens. Ends after a token of `stops`.
Verified verify(const Context& context, Sampler& sampler, int32_t first_row,
                const std::vector<int32_t>& draft, const Stops& stops);

/// Rejection sampling (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1): a drafted token
/// is accepted with probability min(1, p / q), where q is the distribution it was drawn from and p the
/// target's after the sampler chain; after the first rejection a token is drawn from max(0, p - q),
/// normalised. The output follows p exactly, but differs from sampling without a draft. `distributions`: q,
/// [draft, n_vocab].
Verified verify_by_rejection(const Context& context, Sampler& sampler, int32_t first_row,
                             const std::vector<int32_t>& draft, const float* distributions,
                             const Stops& stops);

}  // namespace llamatap
