#pragma once

#include <llama-cpp.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <random>
#include <utility>
#include <vector>

#include "engine/model/model.hpp"
#include "engine/try_hold.hpp"

namespace llamatap {

struct SamplerOptions {
  float temperature = 0.0F;  // 0: greedy
  int32_t top_k = 0;         // 0: off
  float top_p = 1.0F;        // 1: off
  float min_p = 0.0F;        // 0: off
  float repeat_penalty = 1.0F;
  float frequency_penalty = 0.0F;
  float presence_penalty = 0.0F;
  int32_t penalty_last_n = 64;  // 0: no penalties
  uint32_t seed = 0;
  // Added to the logits first; -infinity rules a token out.
  std::vector<std::pair<int32_t, float>> logit_bias;
};

/// Sampler chain of the engine: logit bias, penalties, top-k, top-p, min-p, temperature, draw. Keeps the
/// recent tokens (for the penalties) and the random state. One thread at a time: the caller must hold() it.
class Sampler {
 public:
  Sampler(std::shared_ptr<Model> model, const SamplerOptions& options);

  /// Throws Busy if another thread holds it.
  std::unique_lock<std::mutex> hold() {
    return try_hold(mutex_, "another thread is using this sampler; give each thread a sampler of its own");
  }
  /// Draws a token from `n_vocab` logits and accepts it.
  int32_t sample(const float* logits, int32_t n_vocab);
  /// The probabilities that sample() would draw from: 0 for tokens that the chain rules out. With temperature
  /// 0: 1 for the most likely token.
  void distribution(const float* logits, int32_t n_vocab, float* probs) const;
  /// Next uniform number in [0, 1), for sampling from `distribution`.
  double uniform();
  /// Accepts a token that was not drawn here (for the penalties).
  void accept(int32_t token);
  /// Back to the initial state: no recent tokens, random numbers from the seed.
  void reset();

 private:
  void seed_draws();
  void check_bias() const;
  int32_t sample_fast(const float* logits, int32_t n_vocab);
  /// Sets `result` to all tokens with their biased logits. Throws InvalidInput when the chain cannot choose
  /// one.
  void candidates(const float* logits, int32_t n_vocab, std::vector<llama_token_data>& result) const;

  std::shared_ptr<Model> model_;
  SamplerOptions options_;
  std::mutex mutex_;
  std::mt19937 random_;
  /// The same numbers as those of the chain's last sampler, for sample_fast().
  std::mt19937 draws_;
  /// Whether nothing but a temperature, 0 included, chooses the token.
  bool only_temperature_ = false;
  /// Kept from token to token: to allocate it takes as long as to fill it.
  std::vector<llama_token_data> candidates_;
  llama_sampler_ptr chain_;
};

}  // namespace llamatap
