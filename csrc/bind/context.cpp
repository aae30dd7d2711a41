#include "engine/context/context.hpp"

#include "bind/bind.hpp"
#include "capture/extract.hpp"
#include "capture/tap.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using ConstMap = std::shared_ptr<LayerMap>;

/// (tokens, begin, end, pooling, out as bytes)
using Job = std::tuple<Ints, int32_t, int32_t, std::string, Bytes>;

/// A poll that asks a function of Python's, too. What the function raises comes out of the call.
Poll cancellable(const Poll& signals, const std::optional<py::typing::Callable<bool()>>& cancelled) {
  if (!cancelled) return signals;
  return [signals, function = cancelled->ptr()] {
    if (signals) signals();
    const py::gil_scoped_acquire gil;
    if (py::reinterpret_borrow<py::function>(function)().cast<bool>()) throw Cancelled();
    return false;
  };
}

bool run_extract(Context& context, const ConstMap& map, const std::vector<int32_t>& slots,
                 const std::string& dtype_name, const std::vector<Job>& given,
                 const std::optional<py::typing::Callable<bool()>>& cancelled) {
  const DType dtype = parse_dtype(dtype_name);
  std::vector<ExtractJob> jobs;
  for (const auto& [tokens, begin, end, pooling, out] : given) {
    ExtractJob job{to_vector(tokens), begin, end, parse_pooling(pooling), nullptr};
    const auto rows = job.pooling == Pooling::none ? static_cast<size_t>(end - begin) : 1U;
    const size_t bytes = rows * slots.size() * static_cast<size_t>(map->n_embd()) * item_size(dtype);
    if (static_cast<size_t>(out.nbytes()) != bytes) {
      throw InvalidInput("out must hold " + std::to_string(bytes) + " bytes, not " +
                         std::to_string(out.nbytes()));
    }
    // mutable_data() refuses a read-only array.
    job.out = reinterpret_cast<std::byte*>(const_cast<Bytes&>(out).mutable_data());
    jobs.push_back(std::move(job));
  }
  const Poll poll = cancellable(signal_poll(), cancelled);
  // `given` holds the arrays until this returns; no Python object but `cancelled` is touched in between.
  const GilReleased released;
  return extract(context, map, slots, dtype, jobs, poll);
}

TapWay parse_way(const std::string& name) {
  if (name == "automatic") return TapWay::automatic;
  if (name == "callback") return TapWay::callback;
  if (name == "hooks") return TapWay::hooks;
  throw InvalidInput("way must be automatic, callback or hooks, not " + name);
}

std::tuple<py::array, Ints> run_tapped(Context& context, const ConstMap& map,
                                       const std::vector<int32_t>& slots, const std::string& dtype_name,
                                       bool outputs_only, const Batch& batch, const std::string& way) {
  const TapPlan plan{slots, parse_way(way), parse_dtype(dtype_name), outputs_only};
  Tapped tapped;
  // A copy of the batch: another thread may change it while the engine computes.
  const Batch copy = batch;
  {
    const Poll poll = signal_poll();
    const GilReleased released;
    tapped = decode_tapped(context, map, plan, copy, poll);
  }
  const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(tapped.rows.size()),
                                       static_cast<py::ssize_t>(slots.size()), map->n_embd()};
  std::vector<int32_t> tokens;
  for (const int32_t row : tapped.rows) tokens.push_back(copy.has_embeddings() ? -1 : copy.tokens()[row]);
  return {view_of(tapped.block, shape, plan.dtype, false), to_array(tokens)};
}

}  // namespace

void register_context(py::module_& module) {
  py::class_<Context, std::shared_ptr<Context>> context(module, "Context", "A model with memory.");
  seal(context);
  context
      .def(py::init([](const std::shared_ptr<Model>& model, uint32_t n_ctx, uint32_t n_batch,
                       uint32_t n_ubatch, uint32_t n_seq_max, uint32_t n_rs_seq, uint32_t n_outputs_max,
                       int32_t n_threads, const std::string& type_k, const std::string& type_v,
                       int32_t flash_attention, bool kv_unified, bool swa_full, uint64_t memory_available) {
             ContextOptions options;
             options.n_ctx = n_ctx;
             options.n_batch = n_batch;
             options.n_ubatch = n_ubatch;
             options.n_seq_max = n_seq_max;
             options.n_rs_seq = n_rs_seq;
             options.n_outputs_max = n_outputs_max;
             options.n_threads = n_threads;
             options.type_k = type_k;
             options.type_v = type_v;
             options.flash_attention = flash_attention;
             options.kv_unified = kv_unified;
             options.swa_full = swa_full;
             options.memory_available = memory_available;
             const GilReleased released;
             return freed_without_gil(std::make_shared<Context>(model, options));
           }),
           py::arg("model"), py::kw_only(), py::arg("n_ctx"), py::arg("n_batch"), py::arg("n_ubatch"),
           py::arg("n_seq_max"), py::arg("n_rs_seq"), py::arg("n_outputs_max"), py::arg("n_threads"),
           py::arg("type_k"), py::arg("type_v"), py::arg("flash_attention"), py::arg("kv_unified"),
           py::arg("swa_full"), py::arg("memory_available"))
      .def_property_readonly("n_ctx", &Context::n_ctx)
      .def_property_readonly("n_ctx_seq", &Context::n_ctx_seq)
      .def_property_readonly("position_limit",
                             [](const Context& context) { return context.model()->position_limit(); })
      .def_property_readonly("engine_seconds", &Context::engine_seconds)
      .def_property_readonly("nodes_seen", &Context::nodes_seen)
      .def_property_readonly("zeroed_cells", &Context::zeroed_cells)
      .def_property_readonly("n_batch", &Context::n_batch)
      .def_property_readonly("n_ubatch", &Context::n_ubatch)
      .def_property_readonly("flash_attention", &Context::flash_attention)
      .def_property_readonly("has_memory", &Context::has_memory)
      .def_property_readonly("causal", &Context::causal)
      .def(
          "decode",
          [](Context& context, const Batch& batch) {
            // A copy of the batch: another thread may change it while the engine computes.
            const Batch copy = batch;
            const Poll poll = signal_poll();
            const GilReleased released;
            context.decode(copy, nullptr, poll);
          },
          py::arg("batch"))
      .def("decode_tapped", &run_tapped, py::arg("map"), py::arg("slots"), py::arg("dtype"),
           py::arg("outputs_only"), py::arg("batch"), py::arg("way") = "automatic",
           "Decode and capture: (array [rows, n_slots, n_embd], int32 token ids of the rows). `way` is "
           "callback, hooks, or automatic: the faster one.")
      .def("extract", &run_extract, py::arg("map"), py::arg("slots"), py::arg("dtype"),
           py::arg("jobs").noconvert(), py::arg("cancelled") = std::nullopt,
           "Capture without logits: jobs are (tokens, begin, end, pooling, out as bytes), a sequence each. "
           "`cancelled` is asked about every 50 ms; when it says so, CancelledError is raised. Returns "
           "whether all values of the last wanted layer are finite.")
      .def(
          "logits",
          [](const Context& context, int32_t row) {
            py::array_t<float> values(context.model()->vocab().size());
            context.copy_logits(row, values.mutable_data());
            return values;
          },
          py::arg("row"))
      .def("memory_clear", &Context::memory_clear, py::call_guard<GilReleased>())
      .def("memory_remove", &Context::memory_remove, py::arg("seq"), py::arg("p0"), py::arg("p1"),
           py::call_guard<GilReleased>())
      .def("memory_copy", &Context::memory_copy, py::arg("source"), py::arg("target"), py::arg("p0"),
           py::arg("p1"), py::call_guard<GilReleased>())
      .def("memory_keep", &Context::memory_keep, py::arg("seq"), py::call_guard<GilReleased>())
      .def("memory_shift", &Context::memory_shift, py::arg("seq"), py::arg("p0"), py::arg("p1"),
           py::arg("delta"), py::call_guard<GilReleased>())
      .def("memory_first", &Context::memory_first, py::arg("seq"))
      .def("memory_last", &Context::memory_last, py::arg("seq"))
      .def(
          "save",
          [](const Context& context, int32_t seq) {
            std::string state;
            {
              const GilReleased released;
              state = context.save(seq);
            }
            return py::bytes(state);
          },
          py::arg("seq"))
      .def(
          "restore",
          [](Context& context, int32_t seq, const py::bytes& given) {
            const std::string state = given;
            const GilReleased released;
            context.restore(seq, state);
          },
          py::arg("seq"), py::arg("state"));
}

}  // namespace llamatap::bind
