#pragma once

#include <cstdint>
#include <vector>

#include "draft/drafter.hpp"
#include "engine/context/context.hpp"
#include "engine/sampler.hpp"

namespace llamatap {

/// The result of verifying a draft.
struct Verified {
  std::vector<int32_t> tokens;  // those of the draft that were accepted, and one more
  int32_t n_accepted = 0;
};

/// The tokens that end a text.
struct Stops {
  bool end_of_generation = true;
  std::vector<int32_t> tokens;
};

/// Samples the target's next tokens, each by the whole sampler chain, while they are equal to the draft's:
/// the output is that of sampling without a draft, token for token. The logits are those of the entries
/// first_row, first_row + 1, ... of the context's last batch: of the token before the draft, then of each of
/// its tokens. Ends after a token of `stops`.
Verified verify(const Context& context, Sampler& sampler, int32_t first_row,
                const std::vector<int32_t>& draft, const Stops& stops);

/// Rejection sampling: a drafted token is accepted with probability min(1, p / q), where q is what it was
/// drawn from and p the target's distribution after the sampler chain; at the first rejection a token is
/// drawn from max(0, p - q), scaled (Leviathan et al. 2023, https://arxiv.org/abs/2211.17192, algorithm 1).
/// The output follows p exactly, but is not the one of sampling without a draft. `distributions`: [draft,
/// n_vocab].
Verified verify_by_rejection(const Context& context, Sampler& sampler, int32_t first_row,
                             const std::vector<int32_t>& draft, const float* distributions,
                             const Stops& stops);

}  // namespace llamatap
