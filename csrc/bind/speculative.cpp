#include <algorithm>
#include <optional>
#include <tuple>

#include "bind/bind.hpp"
#include "bind/options.hpp"
#include "draft/distribution.hpp"
#include "draft/speculative_context.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

std::shared_ptr<SpeculativeContext> make_context(const std::shared_ptr<Context>& target,
                                                 const std::shared_ptr<Model>& draft, bool plain,
                                                 const ContextOptions& options) {
  const GilReleased released;
  const DraftKind kind = plain ? DraftKind::model : kind_of(*draft);
  return freed_without_gil(std::make_shared<SpeculativeContext>(target, draft, kind, options));
}

const char* name_of(DraftKind kind) {
  switch (kind) {
    case DraftKind::model: return "model";
    case DraftKind::eagle3: return "eagle3";
    case DraftKind::mtp: return "mtp";
    case DraftKind::dflash: return "dflash";
  }
  return "";
}

Floats encode(SpeculativeContext& spec, const Floats& features) {
  if (features.ndim() != 2 || features.shape(1) != spec.n_features()) {
    throw InvalidInput("features must be (n, " + std::to_string(spec.n_features()) + ") float32 values");
  }
  const auto n = static_cast<int32_t>(features.shape(0));
  Floats states({features.shape(0), static_cast<py::ssize_t>(spec.n_state())});
  float* target = states.mutable_data();
  const Poll poll = signal_poll();
  {
    const GilReleased released;
    const auto held = spec.hold();
    spec.encode(features.data(), n, target, poll);
  }
  return states;
}

/// Throws InvalidInput or Unsupported unless the arrays form pairs that this draft can decode.
void check_pairs(const SpeculativeContext& spec, const Ints& tokens, const std::optional<Floats>& states,
                 const Ints& positions, const Ints& seqs, const std::vector<bool>& outputs) {
  const py::ssize_t n = tokens.size();
  const int32_t width = spec.n_state();
  if (spec.kind() == DraftKind::dflash) {
    throw Unsupported(
        "DFlash files decode blocks on features, not pairs of tokens and states; use DFlashDrafter");
  }
  if (width == 0 && states) throw InvalidInput("a plain model takes no states");
  if (positions.size() != n || seqs.size() != n || static_cast<py::ssize_t>(outputs.size()) != n) {
    throw InvalidInput("tokens, positions, seqs and outputs must have the same length");
  }
  if (width > 0 && (!states || states->ndim() != 2 || states->shape(0) != n || states->shape(1) != width)) {
    throw InvalidInput("states must be (" + std::to_string(n) + ", " + std::to_string(width) +
                       ") float32 values");
  }
}

void check_index(const char* name, int32_t value, int32_t first, int32_t last) {
  if (value >= first && value <= last) return;
  throw InvalidInput(std::string(name) + " must be in " + std::to_string(first) + ".." +
                     std::to_string(last) + ", not " + std::to_string(value));
}

/// Output buffers of decode(): one row per output.
struct DecodeTarget {
  int32_t* ids;
  float* probs;
  float* states;  // null: not wanted
  float* logits;  // null: not wanted
};

void copy_outputs(const SpeculativeContext& spec, const std::vector<int32_t>& rows, int32_t top_k,
                  DecodeTarget target) {
  const auto& context = *spec.context();
  const ContextLock lock = context.hold();
  const int32_t n_vocab = context.model()->vocab().size();
  std::vector<float> all(static_cast<size_t>(n_vocab));
  for (const int32_t row : rows) {
    const float* values = context.output_logits(row);
    softmax(values, n_vocab, 1.0F, all.data());
    for (const int32_t id : largest(values, n_vocab, top_k)) {
      *target.ids++ = id;
      *target.probs++ = all[static_cast<size_t>(id)];
    }
    if (target.logits != nullptr) target.logits = std::copy(values, values + n_vocab, target.logits);
    if (target.states != nullptr) {
      const float* state = context.next_state(row);
      target.states = std::copy(state, state + spec.n_state(), target.states);
    }
  }
}

/// (top ids, their probabilities, next states or none, logits or none), by output.
std::tuple<Ints, Floats, std::optional<Floats>, std::optional<Floats>> decode(
    SpeculativeContext& spec, const Ints& tokens, const std::optional<Floats>& states, const Ints& positions,
    const Ints& seqs, const std::vector<bool>& outputs, int32_t top_k, bool with_logits, int32_t head) {
  check_index("head", head, 0, spec.n_heads() - 1);
  check_pairs(spec, tokens, states, positions, seqs, outputs);
  const int32_t width = spec.n_state();
  const int32_t n_vocab = spec.context()->model()->vocab().size();
  check_index("top_k", top_k, 1, n_vocab);
  const float* state = states ? states->data() : nullptr;
  Batch batch = width > 0 ? Batch::of_pairs(width) : Batch();
  std::vector<int32_t> rows;
  for (py::ssize_t i = 0; i < tokens.size(); ++i) {
    const std::vector<int32_t> sequence{seqs.at(i)};
    const bool output = outputs[static_cast<size_t>(i)];
    if (width > 0) {
      batch.add_pair(tokens.at(i), state + i * width, positions.at(i), sequence, output);
    } else {
      batch.add(tokens.at(i), positions.at(i), sequence, output);
    }
    if (output) rows.push_back(static_cast<int32_t>(i));
  }
  const auto n_outputs = static_cast<py::ssize_t>(rows.size());
  Ints ids({n_outputs, static_cast<py::ssize_t>(top_k)});
  Floats probs({n_outputs, static_cast<py::ssize_t>(top_k)});
  std::optional<Floats> next;
  std::optional<Floats> logits;
  if (width > 0) next = Floats({n_outputs, static_cast<py::ssize_t>(width)});
  if (with_logits) logits = Floats({n_outputs, static_cast<py::ssize_t>(n_vocab)});
  const DecodeTarget target{ids.mutable_data(), probs.mutable_data(), next ? next->mutable_data() : nullptr,
                            logits ? logits->mutable_data() : nullptr};
  const Poll poll = signal_poll();
  {
    // Do not copy arrays here: reference counts need the GIL.
    const GilReleased released;
    const auto held = spec.hold();
    HeadSelection selection(spec);
    selection.select(head);
    if (batch.size() > 0) spec.decode(batch, poll);
    copy_outputs(spec, rows, top_k, target);
  }
  return {ids, probs, next, logits};
}

}  // namespace

void register_speculative(py::module_& module) {
  py::class_<SpeculativeContext, std::shared_ptr<SpeculativeContext>> bound(
      module, "SpeculativeContext", "Draft model's context, for all sequences of the target.");
  seal(bound);
  def_with_options(kDraftContextOptions, [&](const auto&... options) {
    bound.def(py::init(with_options<std::shared_ptr<Context>, std::shared_ptr<Model>, bool>(
                  kDraftContextOptions, &make_context)),
              py::arg("target"), py::arg("draft"), py::kw_only(), py::arg("plain"), options...);
  });
  bound.def_property_readonly("kind", [](const SpeculativeContext& self) { return name_of(self.kind()); })
      .def_property_readonly("context",
                             [](const SpeculativeContext& self) { return freed_without_gil(self.context()); })
      .def_property_readonly("target_slots", &SpeculativeContext::target_slots)
      .def_property_readonly("n_features", &SpeculativeContext::n_features)
      .def_property_readonly("n_state", &SpeculativeContext::n_state)
      .def_property_readonly("n_heads", &SpeculativeContext::n_heads)
      .def_property_readonly("longest_block",
                             [](const SpeculativeContext& self) -> std::optional<int32_t> {
                               if (self.kind() != DraftKind::dflash) return std::nullopt;
                               return self.block().size - self.block().first_slot;
                             })
      .def_property_readonly("block_size", [](const SpeculativeContext& self) { return self.block().size; })
      .def("encode", &encode, py::arg("features").noconvert())
      .def("decode", &decode, py::arg("tokens").noconvert(), py::arg("states").noconvert(),
           py::arg("positions").noconvert(), py::arg("seqs").noconvert(), py::arg("outputs"),
           py::arg("top_k"), py::arg("with_logits"), py::arg("head"),
           "Decode pairs: (ids, probabilities, next states or None, logits or None) of the outputs.");
}

}  // namespace llamatap::bind
