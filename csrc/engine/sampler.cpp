#include "engine/sampler.hpp"

#include <algorithm>
#include <cmath>

#include "engine/error.hpp"
#include "engine/logit_scan.hpp"

namespace llamatap {

namespace {

// A larger buffer would take gigabytes.
constexpr int32_t kMaxPenaltyLastN = 1 << 20;

void require(bool good, const char* what) {
  if (!good) throw InvalidInput(what);
}

}  // namespace

Sampler::Sampler(std::shared_ptr<Model> model, const SamplerOptions& options)
    : model_(std::move(model)),
      options_(options),
      chain_(llama_sampler_chain_init(llama_sampler_chain_default_params())) {
  require(std::isfinite(options.temperature) && options.temperature >= 0,
          "temperature must be finite and not negative");
  require(options.top_k >= 0, "top_k must not be negative (0: off)");
  require(options.top_p > 0 && options.top_p <= 1, "top_p must be in (0, 1]");
  require(options.min_p >= 0 && options.min_p <= 1, "min_p must be in [0, 1]");
  require(std::isfinite(options.repeat_penalty) && options.repeat_penalty > 0,
          "repeat_penalty must be above 0");
  require(std::isfinite(options.frequency_penalty), "frequency_penalty must be finite");
  require(std::isfinite(options.presence_penalty), "presence_penalty must be finite");
  require(options.penalty_last_n >= 0 && options.penalty_last_n <= kMaxPenaltyLastN,
          "penalty_last_n must be in 0..1048576 (0: no penalties)");
  check_bias();

  seed_draws();
  const auto add = [&](llama_sampler* sampler) { llama_sampler_chain_add(chain_.get(), sampler); };
  const bool penalties =
      options.repeat_penalty != 1 || options.frequency_penalty != 0 || options.presence_penalty != 0;
  if (penalties && options.penalty_last_n > 0) {
    add(llama_sampler_init_penalties(model_->vocab().size(), options.penalty_last_n, options.repeat_penalty,
                                     options.frequency_penalty, options.presence_penalty));
  }
  const bool cuts = options.top_k > 0 || options.top_p < 1 || options.min_p > 0;
  // The engine draws the numbers of LLAMA_DEFAULT_SEED from a seed that it does not tell.
  only_temperature_ = llama_sampler_chain_n(chain_.get()) == 0 && options.logit_bias.empty() &&
                      (options.temperature == 0 || (!cuts && options.seed != LLAMA_DEFAULT_SEED));
  if (options.temperature == 0) {
    add(llama_sampler_init_greedy());
    return;
  }
  if (options.top_k > 0) add(llama_sampler_init_top_k(options.top_k));
  if (options.top_p < 1) add(llama_sampler_init_top_p(options.top_p, 1));
  if (options.min_p > 0) add(llama_sampler_init_min_p(options.min_p, 1));
  add(llama_sampler_init_temp(options.temperature));
  add(llama_sampler_init_dist(options.seed));
}

void Sampler::check_bias() const {
  int32_t n_left = model_->vocab().size();
  for (const auto& [token, bias] : options_.logit_bias) {
    model_->vocab().check(token);
    if (std::isnan(bias) || (std::isinf(bias) && bias > 0)) {
      throw InvalidInput("the logit_bias of token " + std::to_string(token) +
                         " must be finite, or -infinity to rule the token out");
    }
    if (std::isinf(bias)) --n_left;
  }
  require(n_left > 0, "logit_bias rules all tokens out");
}

void Sampler::candidates(const float* logits, int32_t n_vocab, std::vector<llama_token_data>& result) const {
  if (n_vocab != model_->vocab().size()) {
    throw InvalidInput("expected " + std::to_string(model_->vocab().size()) + " logits, found " +
                       std::to_string(n_vocab));
  }
  result.resize(static_cast<size_t>(n_vocab));
  for (int32_t token = 0; token < n_vocab; ++token) result[token] = {token, logits[token], 0.0F};
  for (const auto& [token, bias] : options_.logit_bias) result[token].logit += bias;
  float largest = -1;  // absolute value; -infinity (ruled out) is skipped
  for (int32_t token = 0; token < n_vocab; ++token) {
    const float logit = result[token].logit;
    if (std::isnan(logit) || (std::isinf(logit) && logit > 0)) {
      throw InvalidInput("the logits hold NaN or infinity (token " + std::to_string(token) + ")");
    }
    if (std::isfinite(logit)) largest = std::max(largest, std::abs(logit));
  }
  if (largest < 0) throw InvalidInput("the logits leave no token possible: all are -infinity");
  if (options_.temperature > 0 && !std::isfinite(largest / options_.temperature)) {
    throw InvalidInput(
        "logits up to " + std::to_string(largest) +
        " overflow when divided by the temperature; use temperature=0 for the most likely token");
  }
}

int32_t Sampler::sample(const float* logits, int32_t n_vocab) {
  if (const int32_t token = sample_fast(logits, n_vocab); token >= 0) return token;
  candidates(logits, n_vocab, candidates_);
  llama_token_data_array array{candidates_.data(), candidates_.size(), -1, false};
  llama_sampler_apply(chain_.get(), &array);
  if (array.selected < 0 || array.selected >= static_cast<int64_t>(array.size)) {
    throw EngineFailed("the sampler chain chose no token");
  }
  const int32_t token = array.data[array.selected].id;
  llama_sampler_accept(chain_.get(), token);
  return token;
}

/// The token that the chain chooses if it consists of a temperature alone, 0 included; without copying all
/// candidates. -1 where candidates() throws.
int32_t Sampler::sample_fast(const float* logits, int32_t n_vocab) {
  if (!only_temperature_ || n_vocab != model_->vocab().size()) return -1;
  const LogitRange range = logit_range(logits, n_vocab);
  if (!range.usable) return -1;
  if (options_.temperature == 0) return first_largest(logits, n_vocab, range.largest);
  if (!std::isfinite(range.largest_absolute / options_.temperature)) return -1;
  const double point = std::uniform_real_distribution<double>(0.0, 1.0)(draws_);
  return draw_softmax(logits, n_vocab, range.largest, options_.temperature, point);
}

void Sampler::distribution(const float* logits, int32_t n_vocab, float* probs) const {
  std::vector<llama_token_data> all;
  candidates(logits, n_vocab, all);
  llama_token_data_array array{all.data(), all.size(), -1, false};
  // The whole chain except the choice at its end.
  const int32_t n = llama_sampler_chain_n(chain_.get()) - 1;
  for (int32_t i = 0; i < n; ++i) llama_sampler_apply(llama_sampler_chain_get(chain_.get(), i), &array);
  std::fill(probs, probs + n_vocab, 0.0F);
  const llama_token_data* const begin = array.data;
  const llama_token_data* const end = begin + array.size;
  const auto* best = std::max_element(begin, end, [](const auto& a, const auto& b) {
    return a.logit < b.logit || (a.logit == b.logit && a.id > b.id);
  });
  if (options_.temperature == 0) {
    probs[best->id] = 1;
    return;
  }
  double sum = 0;
  for (const auto* one = begin; one != end; ++one) sum += std::exp(double{one->logit} - double{best->logit});
  for (const auto* one = begin; one != end; ++one) {
    probs[one->id] = static_cast<float>(std::exp(double{one->logit} - double{best->logit}) / sum);
  }
}

void Sampler::seed_draws() {
  // The chain's own random numbers come from the seed alone; reusing them here would correlate tokens.
  std::seed_seq keys{options_.seed, 1U};
  random_.seed(keys);
  draws_.seed(options_.seed);
}

double Sampler::uniform() { return std::uniform_real_distribution<double>()(random_); }

void Sampler::accept(int32_t token) {
  model_->vocab().check(token);
  llama_sampler_accept(chain_.get(), token);
}

void Sampler::reset() {
  llama_sampler_reset(chain_.get());
  seed_draws();
}

}  // namespace llamatap
