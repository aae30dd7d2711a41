#include <algorithm>
#include <tuple>

#include "bind/bind.hpp"
#include "draft/block_drafter.hpp"
#include "draft/distribution.hpp"
#include "draft/drafter.hpp"
#include "draft/ngram.hpp"
#include "draft/speculative_context.hpp"
#include "draft/token_drafter.hpp"
#include "draft/verify.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

using Floats = py::array_t<float, py::array::c_style>;

/// (sequence, last token, its position, n_max, seed)
using Request = std::tuple<int32_t, int32_t, int32_t, int32_t, uint32_t>;

const char* name_of(DraftKind kind) {
  switch (kind) {
    case DraftKind::model:
      return "model";
    case DraftKind::eagle3:
      return "eagle3";
    case DraftKind::mtp:
      return "mtp";
    case DraftKind::dflash:
      return "dflash";
  }
  return "";
}

std::shared_ptr<SpeculativeContext> make_speculative(
    const std::shared_ptr<Context>& target, const std::shared_ptr<Model>& draft, bool plain, uint32_t n_ctx,
    uint32_t n_batch, uint32_t n_ubatch, uint32_t n_seq_max, int32_t n_threads, const std::string& type_k,
    const std::string& type_v, int32_t flash_attention, bool kv_unified, uint64_t memory_available) {
  ContextOptions options;
  options.n_ctx = n_ctx;
  options.n_batch = n_batch;
  options.n_ubatch = n_ubatch;
  options.n_seq_max = n_seq_max;
  options.n_threads = n_threads;
  options.type_k = type_k;
  options.type_v = type_v;
  options.flash_attention = flash_attention;
  options.kv_unified = kv_unified;
  options.memory_available = memory_available;
  const GilReleased released;
  const DraftKind kind = plain ? DraftKind::model : SpeculativeContext::kind_of(*draft);
  return freed_without_gil(std::make_shared<SpeculativeContext>(target, draft, kind, options));
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

/// (top ids, their probabilities, next states or none, logits or none) of the outputs, in order.
std::tuple<Ints, Floats, std::optional<Floats>, std::optional<Floats>> decode(
    SpeculativeContext& spec, const Ints& tokens, const std::optional<Floats>& states, const Ints& positions,
    const Ints& seqs, const std::vector<bool>& outputs, int32_t top_k, bool with_logits, int32_t head) {
  const py::ssize_t n = tokens.size();
  const int32_t width = spec.n_state();
  if (head < 0 || head >= spec.n_heads()) {
    throw InvalidInput("head must be in 0.." + std::to_string(spec.n_heads() - 1) + ", not " +
                       std::to_string(head));
  }
  if (spec.kind() == DraftKind::dflash) {
    throw Unsupported(
        "DFlash files decode blocks on features, not pairs of tokens and states; use DFlashDrafter");
  }
  if (width == 0 && states) throw InvalidInput("a plain model takes no states");
  if (positions.size() != n || seqs.size() != n || static_cast<py::ssize_t>(outputs.size()) != n) {
    throw InvalidInput("tokens, positions, seqs and outputs must be of one length");
  }
  if (width > 0 && (!states || states->ndim() != 2 || states->shape(0) != n || states->shape(1) != width)) {
    throw InvalidInput("states must be (" + std::to_string(n) + ", " + std::to_string(width) +
                       ") float32 values");
  }
  const int32_t n_vocab = spec.context()->model()->vocab().size();
  if (top_k < 1 || top_k > n_vocab) {
    throw InvalidInput("top_k must be in 1.." + std::to_string(n_vocab) + ", not " + std::to_string(top_k));
  }
  Batch batch = width > 0 ? Batch::of_pairs(width) : Batch();
  std::vector<int32_t> rows;
  for (py::ssize_t i = 0; i < n; ++i) {
    const std::vector<int32_t> sequence{seqs.at(i)};
    const bool output = outputs[static_cast<size_t>(i)];
    if (width > 0) {
      batch.add_pair(tokens.at(i), states->data(i, 0), positions.at(i), sequence, output);
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
  int32_t* ids_out = ids.mutable_data();
  float* probs_out = probs.mutable_data();
  float* next_out = next ? next->mutable_data() : nullptr;
  float* logits_out = logits ? logits->mutable_data() : nullptr;
  const Poll poll = signal_poll();
  {
    // No array is copied in here: that counts references, which takes the GIL.
    const GilReleased released;
    const auto held = spec.hold();
    auto& context = *spec.context();
    HeadSelection selection(spec);
    selection.select(head);
    if (n > 0) spec.decode(batch, poll);
    const ContextLock lock = context.hold();
    std::vector<float> all(static_cast<size_t>(n_vocab));
    for (const int32_t row : rows) {
      const float* values = context.output_logits(row);
      softmax(values, n_vocab, 1.0F, all.data());
      for (const int32_t id : largest(values, n_vocab, top_k)) {
        *ids_out++ = id;
        *probs_out++ = all[static_cast<size_t>(id)];
      }
      if (logits_out != nullptr) logits_out = std::copy(values, values + n_vocab, logits_out);
      if (next_out != nullptr) {
        const float* state = context.next_state(row);
        next_out = std::copy(state, state + width, next_out);
      }
    }
  }
  return {ids, probs, next, logits};
}

void process(Drafter& drafter, const Batch& batch, const std::optional<Floats>& states) {
  const Batch copy = batch;
  const int32_t width = drafter.n_features();
  const bool fits =
      states && states->ndim() == 2 && states->shape(0) == copy.size() && states->shape(1) == width;
  if (width > 0 && !fits) {
    throw InvalidInput("the drafter takes the target's states of the batch, (" + std::to_string(copy.size()) +
                       ", " + std::to_string(width) + ") float32 values");
  }
  const float* values = width > 0 ? states->data() : nullptr;
  const Poll poll = signal_poll();
  const GilReleased released;
  drafter.process(copy, values, poll);
}

/// By request: (tokens, probabilities or none, distributions or none).
std::vector<std::tuple<Ints, std::optional<Floats>, std::optional<Floats>>> draft(
    Drafter& drafter, const std::vector<Request>& given) {
  std::vector<DraftRequest> requests;
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
                       ") float32 values: of each drafted token, the distribution that it was drawn from");
  }
  // `distributions` keeps its memory until this returns.
  const float* drawn_from = distributions ? distributions->data() : nullptr;
  const GilReleased released;
  auto found = drawn_from == nullptr
                   ? verify(context, sampler, first_row, tokens, ends)
                   : verify_by_rejection(context, sampler, first_row, tokens, drawn_from, ends);
  return {std::move(found.tokens), found.n_accepted};
}

}  // namespace

void register_draft(py::module_& module) {
  py::class_<SpeculativeContext, std::shared_ptr<SpeculativeContext>> spec(
      module, "SpeculativeContext", "One context of a draft model for all sequences of a target's.");
  seal(spec);
  spec.def(py::init(&make_speculative), py::arg("target"), py::arg("draft"), py::kw_only(), py::arg("plain"),
           py::arg("n_ctx"), py::arg("n_batch"), py::arg("n_ubatch"), py::arg("n_seq_max"),
           py::arg("n_threads"), py::arg("type_k"), py::arg("type_v"), py::arg("flash_attention"),
           py::arg("kv_unified"), py::arg("memory_available"))
      .def_property_readonly("kind", [](const SpeculativeContext& self) { return name_of(self.kind()); })
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
           "(ids, probabilities, next states or None, logits or None) of the outputs.");

  py::class_<Drafter> drafter(module, "Drafter", "Guesses the next tokens of sequences.");
  seal(drafter);
  drafter.def("process", &process, py::arg("batch"), py::arg("states").noconvert() = py::none())
      .def("draft", &draft, py::arg("requests"),
           "Requests are (sequence, last token, its position, n_max, seed); drafts are (tokens, "
           "probabilities or "
           "None, distributions or None), in the same order.")
      .def("accept", &Drafter::accept, py::arg("seq"), py::arg("n"), py::call_guard<GilReleased>())
      .def("reset", &Drafter::reset, py::arg("seq"), py::call_guard<GilReleased>());

  module.def(
      "speculative_drafter",
      [](const std::shared_ptr<SpeculativeContext>& spec, int32_t n_max, int32_t n_min, float p_min,
         float temperature, uint32_t seed) -> std::unique_ptr<Drafter> {
        const DraftSettings settings{n_max, n_min, p_min, temperature, seed};
        if (spec->kind() == DraftKind::dflash) return std::make_unique<BlockDrafter>(spec, settings);
        return std::make_unique<TokenDrafter>(spec, settings);
      },
      py::arg("spec"), py::kw_only(), py::arg("n_max"), py::arg("n_min"), py::arg("p_min"),
      py::arg("temperature"), py::arg("seed"),
      "What drafts with a draft context: token by token, or a block.");
  module.def(
      "ngram_drafter",
      [](int32_t n_longest, int32_t n_shortest, int32_t n_max, int32_t n_min) -> std::unique_ptr<Drafter> {
        return std::make_unique<NGramDrafter>(n_longest, n_shortest, n_max, n_min);
      },
      py::kw_only(), py::arg("n_longest"), py::arg("n_shortest"), py::arg("n_max"), py::arg("n_min"),
      "Drafts what followed the same tokens before.");

  module.def("verify", &run_verify, py::arg("context"), py::arg("sampler"), py::arg("first_row"),
             py::arg("draft").noconvert(), py::arg("distributions").noconvert(), py::arg("end_of_generation"),
             py::arg("stops"), "(tokens, how many of the draft were accepted).");
}

}  // namespace llamatap::bind
