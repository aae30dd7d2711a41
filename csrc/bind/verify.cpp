#include "draft/verify.hpp"

#include <optional>
#include <tuple>
#include <utility>

#include "bind/bind.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

std::tuple<std::vector<int32_t>, int32_t> run_verify(const Context& context, Sampler& sampler,
                                                     int32_t first_row, const Ints& draft,
                                                     const std::optional<Floats>& distributions,
                                                     bool end_of_generation,
                                                     const std::vector<int32_t>& stops) {
  const Stops ends{end_of_generation, stops};
  const auto tokens = to_vector(draft);
  const int32_t n_vocab = context.model()->vocab().size();
  if (first_row < 0) throw InvalidInput("first_row must be 0 or more, not " + std::to_string(first_row));
  if (distributions && (distributions->ndim() != 2 || distributions->shape(0) != draft.size() ||
                        distributions->shape(1) != n_vocab)) {
    throw InvalidInput("distributions must be (" + std::to_string(draft.size()) + ", " +
                       std::to_string(n_vocab) +
                       ") float32 values: the distribution that each drafted token was drawn from");
  }
  // `distributions` keeps its memory alive.
  const float* drawn_from = distributions ? distributions->data() : nullptr;
  const GilReleased released;
  auto found = drawn_from == nullptr
                   ? verify(context, sampler, first_row, tokens, ends)
                   : verify_by_rejection(context, sampler, first_row, tokens, drawn_from, ends);
  return {std::move(found.tokens), found.n_accepted};
}

}  // namespace

void register_verify(py::module_& module) {
  module.def("verify", &run_verify, py::arg("context"), py::arg("sampler"), py::arg("first_row"),
             py::arg("draft").noconvert(), py::arg("distributions").noconvert(), py::arg("end_of_generation"),
             py::arg("stops"), "Verify a draft: (tokens, number of accepted draft tokens).");
}

}  // namespace llamatap::bind
