#include "draft/drafter.hpp"

#include <optional>
#include <tuple>

#include "bind/bind.hpp"
#include "bind/options.hpp"
#include "draft/block_drafter.hpp"
#include "draft/ngram.hpp"
#include "draft/speculative_context.hpp"
#include "draft/suffix_drafter.hpp"
#include "draft/token_drafter.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

constexpr std::tuple kSettings{
    Option{"n_max", &DraftSettings::n_max}, Option{"n_min", &DraftSettings::n_min},
    Option{"p_min", &DraftSettings::p_min}, Option{"temperature", &DraftSettings::temperature},
    Option{"seed", &DraftSettings::seed},
};

constexpr std::tuple kSuffixSettings{
    Option{"max_bytes", &SuffixSettings::max_bytes},
    Option{"n_max", &SuffixSettings::n_max},
    Option{"n_min", &SuffixSettings::n_min},
    Option{"p_min", &SuffixSettings::p_min},
    Option{"max_spec_factor", &SuffixSettings::max_spec_factor},
};

std::unique_ptr<Drafter> make_suffix_drafter(const SuffixSettings& settings) {
  return std::make_unique<SuffixDrafter>(settings);
}

std::unique_ptr<Drafter> make_drafter(const std::shared_ptr<SpeculativeContext>& spec,
                                      const DraftSettings& settings) {
  if (spec->kind() == DraftKind::dflash) return std::make_unique<BlockDrafter>(spec, settings);
  return std::make_unique<TokenDrafter>(spec, settings);
}

/// (sequence, last token, its position, n_max, seed)
using Request = std::tuple<int32_t, int32_t, int32_t, int32_t, uint32_t>;

void process(Drafter& drafter, const Batch& batch, const std::optional<Floats>& states) {
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const Batch copy = batch;
  const int32_t width = drafter.n_features();
  const bool fits =
      states && states->ndim() == 2 && states->shape(0) == copy.size() && states->shape(1) == width;
  if (width > 0 && !fits) {
    throw InvalidInput("the drafter needs the target's states of the batch: (" + std::to_string(copy.size()) +
                       ", " + std::to_string(width) + ") float32 values");
  }
  const float* values = states && width > 0 ? states->data() : nullptr;
  const Poll poll = signal_poll();
  const GilReleased released;
  drafter.process(copy, values, poll);
}

/// For each request: (tokens, probabilities or none, distributions or none).
std::vector<std::tuple<Ints, std::optional<Floats>, std::optional<Floats>>> draft(
    Drafter& drafter, const std::vector<Request>& given) {
  std::vector<DraftRequest> requests;
  requests.reserve(given.size());
  for (const auto& [seq, token, position, n_max, seed] : given) {
    requests.push_back({seq, token, position, n_max, seed});
  }
  std::vector<Draft> drafts;
  {
    const Poll poll = signal_poll();
    const GilReleased released;
    drafts = drafter.draft(requests, poll);
  }
  std::vector<std::tuple<Ints, std::optional<Floats>, std::optional<Floats>>> result;
  for (const Draft& one : drafts) {
    const auto n = static_cast<py::ssize_t>(one.tokens.size());
    std::optional<Floats> probs;
    std::optional<Floats> distributions;
    if (!one.probs.empty()) probs = Floats(n, one.probs.data());
    if (!one.distributions.empty()) {
      distributions =
          Floats({n, static_cast<py::ssize_t>(one.distributions.size()) / n}, one.distributions.data());
    }
    result.emplace_back(to_array(one.tokens), probs, distributions);
  }
  return result;
}

}  // namespace

void register_drafter(py::module_& module) {
  py::class_<Drafter> bound(module, "Drafter", "Drafts the next tokens of sequences.");
  seal(bound);
  bound.def("process", &process, py::arg("batch"), py::arg("states").noconvert() = py::none())
      .def("draft", &draft, py::arg("requests"),
           "Requests are (sequence, last token, its position, n_max, seed); drafts are (tokens, "
           "probabilities or "
           "None, distributions or None), in the same order.")
      .def("accept", &Drafter::accept, py::arg("seq"), py::arg("n"), py::call_guard<GilReleased>())
      .def("reset", &Drafter::reset, py::arg("seq"), py::call_guard<GilReleased>());

  def_with_options(kSettings, [&](const auto&... settings) {
    module.def("speculative_drafter",
               with_options<std::shared_ptr<SpeculativeContext>>(kSettings, &make_drafter), py::arg("spec"),
               py::kw_only(), settings...,
               "A drafter on a draft context: token by token, or a block at a time.");
  });
  module.def(
      "ngram_drafter",
      [](int32_t n_longest, int32_t n_shortest, int32_t n_max, int32_t n_min) -> std::unique_ptr<Drafter> {
        return std::make_unique<NGramDrafter>(n_longest, n_shortest, n_max, n_min);
      },
      py::kw_only(), py::arg("n_longest"), py::arg("n_shortest"), py::arg("n_max"), py::arg("n_min"),
      "A drafter of the tokens that followed an earlier occurrence of the last n-gram.");
  def_with_options(kSuffixSettings, [&](const auto&... settings) {
    module.def("suffix_drafter", with_options(kSuffixSettings, &make_suffix_drafter), py::kw_only(),
               settings...,
               "A drafter of the tokens that followed the longest suffix of the text in any text before.");
  });
}

}  // namespace llamatap::bind
