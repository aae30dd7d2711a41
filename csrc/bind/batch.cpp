#include "engine/context/batch.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "bind/bind.hpp"
#include "bind/integers.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

using Sequences = std::variant<Integer, std::vector<Integer>>;

/// Python integers have any size: one that does not fit raises InvalidInputError, not TypeError.
int32_t narrow(int64_t value, const char* what) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max()) {
    throw InvalidInput(std::string(what) + " " + std::to_string(value) + " does not fit into 32 bits");
  }
  return static_cast<int32_t>(value);
}

int32_t narrow(Integer value, const char* what) { return narrow(value.value, what); }

std::vector<int32_t> as_list(const Sequences& sequences) {
  if (const auto* one = std::get_if<Integer>(&sequences)) return {narrow(*one, "sequence id")};
  std::vector<int32_t> result;
  for (const Integer seq : std::get<std::vector<Integer>>(sequences)) {
    const int32_t id = narrow(seq, "sequence id");
    if (std::find(result.begin(), result.end(), id) != result.end()) {
      throw InvalidInput("sequence id " + std::to_string(id) + " is given twice");
    }
    result.push_back(id);
  }
  return result;
}

void add_embedding(Batch& batch, const Floats& values, Integer pos, const Sequences& seq, bool output) {
  if (values.ndim() != 1 || values.size() != batch.n_embd()) {
    throw InvalidInput("expected a vector of " + std::to_string(batch.n_embd()) + " float32 values, found " +
                       std::to_string(values.size()) + " in " + std::to_string(values.ndim()) +
                       " dimensions");
  }
  const float* end = values.data() + values.size();
  const float* wrong = std::find_if(values.data(), end, [](float value) { return !std::isfinite(value); });
  if (wrong != end) {
    // In a shared KV cache, NaN would reach unrelated sequences.
    throw InvalidInput("value " + std::to_string(wrong - values.data()) + " of the embedding is not finite");
  }
  batch.add_embedding(values.data(), narrow(pos, "position"), as_list(seq), output);
}

Batch batch_of(const TokenIds& tokens, Integer seq, Integer pos0) {
  Batch batch;
  const std::vector<int32_t> sequences{narrow(seq, "sequence id")};
  const int64_t first = narrow(pos0, "position");
  for (size_t i = 0; i < tokens.ids.size(); ++i) {
    const int32_t position = narrow(first + static_cast<int64_t>(i), "position");
    batch.add(narrow(tokens.ids[i], "token id"), position, sequences, i + 1 == tokens.ids.size());
  }
  return batch;
}

using Bound = py::class_<Batch>;

void def_add(Bound& bound) {
  bound
      .def(
          "add",
          [](Batch& batch, Integer token, Integer pos, const Sequences& seq, bool output) {
            batch.add(narrow(token, "token id"), narrow(pos, "position"), as_list(seq), output);
          },
          py::arg("token"), py::arg("pos"), py::arg("seq") = Integer{0}, py::arg("output") = false,
          R"(Append a token.

:param pos: its position in the sequence, from 0.
:param seq: the sequence that it belongs to, or a list of sequences.
:param output: whether logits are wanted for it.
:raises InvalidInputError: the batch holds embeddings.)")
      .def("add_embedding", &add_embedding, py::arg("values").noconvert(), py::arg("pos"),
           py::arg("seq") = Integer{0}, py::arg("output") = false,
           R"(Append an embedding in place of a token.

:param values: float32[n_embd], C-contiguous; copied.
:raises InvalidInputError: the width is wrong, a value is NaN or infinite, or the batch holds tokens.)");
}

}  // namespace

void register_batch(py::module_& module) {
  Bound bound(module, "Batch",
              R"(Input of one decode: entries of (token, position, sequence, output flag).

Rows of states and logits are in the order of the entries, whatever order the engine computes them in.
A batch holds token ids, or embeddings when made with ``n_embd``.)");
  seal(bound);
  def_add(bound);
  bound
      .def(py::init([](Integer n_embd) {
             if (n_embd.value < 0) throw InvalidInput("n_embd must not be negative");
             return Batch(narrow(n_embd, "n_embd"));
           }),
           py::arg("n_embd") = Integer{0},
           "An empty batch: of tokens, or of embeddings of width ``n_embd`` when that is not 0.")
      .def_static("of", &batch_of, py::arg("tokens"), py::arg("seq") = Integer{0},
                  py::arg("pos0") = Integer{0},
                  R"(A batch of consecutive tokens of one sequence; the last one is an output.

:param tokens: token ids, in a list or an array of integers.
:param seq: the sequence that they belong to.
:param pos0: the position of the first one.
:raises InvalidInputError: ``tokens`` are not token ids.)")
      .def("clear", &Batch::clear, "Remove all entries.")
      .def("__len__", &Batch::size)
      .def_property_readonly("n_embd", &Batch::n_embd, "Width of embedding entries; 0 for tokens.")
      .def_property_readonly(
          "tokens", [](const Batch& batch) { return to_array(batch.tokens()); },
          "int32[n]: the token ids; empty for embeddings.")
      .def_property_readonly(
          "positions", [](const Batch& batch) { return to_array(batch.positions()); }, "int32[n].")
      .def_property_readonly("sequences", &Batch::sequences, "The sequences of each entry.")
      .def_property_readonly("outputs", &Batch::outputs, "The output flag of each entry.");
}

}  // namespace llamatap::bind
