#include "draft/logprobs.hpp"

#include "bind/bind.hpp"

namespace llamatap::bind {

namespace {

using Doubles = py::array_t<double>;

/// (log-probabilities [rows], most likely ids [rows, n_top], their log-probabilities [rows, n_top])
std::tuple<Doubles, Ints, Doubles> arrays_of(const Logprobs& found) {
  const auto n = static_cast<py::ssize_t>(found.chosen.size());
  const std::vector<py::ssize_t> shape{n, found.n_top};
  return {Doubles(n, found.chosen.data()), Ints(shape, found.top.data()),
          Doubles(shape, found.top_logprobs.data())};
}

}  // namespace

void register_logprobs(py::module_& module) {
  module.def(
      "logprobs",
      [](const Context& context, int32_t first_row, const Ints& tokens, int32_t n_top) {
        const auto of = to_vector(tokens);
        Logprobs found;
        {
          const GilReleased released;
          found = logprobs(context, first_row, of, n_top);
        }
        return arrays_of(found);
      },
      py::arg("context"), py::arg("first_row"), py::arg("tokens").noconvert(), py::arg("n_top"),
      "For tokens at the outputs first_row, first_row + 1, ...: (log-probabilities of the tokens, the most "
      "likely ids, their log-probabilities).");
  module.def(
      "logprobs_of",
      [](const Floats& logits, int32_t token, int32_t n_top) {
        if (logits.ndim() != 1) throw InvalidInput("logits must be a vector");
        Logprobs found;
        add_logprobs(logits.data(), static_cast<int32_t>(logits.size()), token, n_top, found);
        return arrays_of(found);
      },
      py::arg("logits").noconvert(), py::arg("token"), py::arg("n_top"),
      "Like logprobs(), for one token and one row of logits.");
}

}  // namespace llamatap::bind
