#include <pybind11/typing.h>

#include "bind/bind.hpp"
#include "capture/block_pool.hpp"
#include "capture/extract.hpp"
#include "capture/layer_map.hpp"
#include "capture/tap.hpp"
#include "engine/context/context.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

DType parse_dtype(const std::string& name) {
  if (name == "float32") return DType::f32;
  if (name == "float16") return DType::f16;
  if (name == "bfloat16") return DType::bf16;
  throw InvalidInput("dtype must be float32, float16 or bfloat16, not " + name);
}

Pooling parse_pooling(const std::string& name) {
  if (name == "none") return Pooling::none;
  if (name == "mean") return Pooling::mean;
  if (name == "last") return Pooling::last;
  if (name == "max") return Pooling::max;
  throw InvalidInput("pooling must be mean, last or max, not " + name);
}

TapWay parse_way(const std::string& name) {
  if (name == "automatic") return TapWay::automatic;
  if (name == "callback") return TapWay::callback;
  if (name == "hooks") return TapWay::hooks;
  if (name == "copies") return TapWay::copies;
  throw InvalidInput("way must be automatic, callback, copies or hooks, not " + name);
}

/// An array that views the block and keeps it alive. bfloat16 as uint16: NumPy has no bfloat16.
py::array view_of(const std::shared_ptr<Block>& block, const std::vector<py::ssize_t>& shape, DType dtype,
                  bool writable) {
  const py::dtype type = dtype == DType::f32   ? py::dtype::of<float>()
                         : dtype == DType::f16 ? py::dtype("float16")
                                               : py::dtype::of<uint16_t>();
  auto owner = std::make_unique<std::shared_ptr<Block>>(block);
  const py::capsule base(owner.get(),
                         [](void* pointer) { delete static_cast<std::shared_ptr<Block>*>(pointer); });
  static_cast<void>(owner.release());  // the capsule deletes it
  py::array array(type, shape, {}, block->data(), base);
  if (!writable) array.attr("setflags")(py::arg("write") = false);
  return array;
}

using Bytes = py::array_t<uint8_t, py::array::c_style>;
using ConstMap = std::shared_ptr<LayerMap>;

/// (tokens, begin, end, pooling, out as bytes)
using Job = std::tuple<Ints, int32_t, int32_t, std::string, Bytes>;

/// A poll that also calls a Python function. Exceptions of the function end the engine call.
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
                 const std::optional<py::typing::Callable<bool()>>& cancelled, const std::string& way_name) {
  const TapWay way = parse_way(way_name);
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
  // `given` keeps the arrays alive; only `cancelled` is called, with the GIL re-acquired.
  const GilReleased released;
  return extract(context, map, slots, dtype, jobs, way, poll);
}

std::tuple<py::array, Ints> run_tapped(Context& context, const ConstMap& map,
                                       const std::vector<int32_t>& slots, const std::string& dtype_name,
                                       bool outputs_only, const Batch& batch, const std::string& way) {
  const TapPlan plan{slots, parse_way(way), parse_dtype(dtype_name), outputs_only};
  Tapped tapped;
  // Another thread may change the batch while the engine computes.
  // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
  const Batch copy = batch;
  {
    const Poll poll = signal_poll();
    const GilReleased released;
    tapped = decode_tapped(context, map, plan, copy, poll);
  }
  const std::vector<py::ssize_t> shape{static_cast<py::ssize_t>(tapped.rows.size()),
                                       static_cast<py::ssize_t>(slots.size()), map->n_embd()};
  std::vector<int32_t> tokens;
  tokens.reserve(tapped.rows.size());
  for (const int32_t row : tapped.rows) tokens.push_back(copy.has_embeddings() ? -1 : copy.tokens()[row]);
  return {view_of(tapped.block, shape, plan.dtype, false), to_array(tokens)};
}

void register_layer_map(py::module_& module) {
  py::class_<LayerMap, std::shared_ptr<LayerMap>> bound(
      module, "LayerMap", "Maps each layer of a model to its node in the engine's graph.");
  seal(bound);
  bound
      .def_static(
          "resolve",
          [](const std::shared_ptr<Model>& model) {
            const GilReleased released;
            // pybind11 needs a non-const holder; Python cannot change the map.
            return std::const_pointer_cast<LayerMap>(LayerMap::resolve(model));
          },
          py::arg("model"))
      .def_property_readonly("n_layer", &LayerMap::n_layer)
      .def_property_readonly("n_embd", &LayerMap::n_embd)
      .def_property_readonly("has_memory", &LayerMap::has_memory)
      .def_property_readonly("at_once", &LayerMap::at_once)
      .def_property_readonly("norm_slot", &LayerMap::norm_slot)
      .def_property_readonly("has_norm", &LayerMap::has_norm)
      .def_property_readonly(
          "nodes",
          [](const LayerMap& map) {
            std::vector<std::pair<py::str, bool>> nodes;
            for (const auto& source : map.sources()) nodes.emplace_back(to_str(source.node), source.cropped);
            return nodes;
          },
          "By slot (0..n, then the norm): the node's name, and whether it has rows for outputs only. The "
          "norm's name is empty when the model has none.")
      .def_property_readonly(
          "hooked",
          [](const LayerMap& map) {
            std::vector<bool> hooked;
            for (const auto& source : map.sources()) hooked.push_back(source.hooked);
            return hooked;
          },
          "By slot: whether the engine's layer-input hook gives the same node.");
}

}  // namespace

void register_capture(py::module_& module) {
  module.def(
      "allocate",
      [](const std::vector<py::ssize_t>& shape, const std::string& dtype, const Model& model) {
        const DType type = parse_dtype(dtype);
        size_t bytes = item_size(type);
        for (const py::ssize_t length : shape) {
          if (length < 0) throw InvalidInput("negative length in a shape");
          if (__builtin_mul_overflow(bytes, static_cast<size_t>(length), &bytes)) throw std::bad_alloc();
        }
        return view_of(block_for(model, bytes), shape, type, true);
      },
      py::arg("shape"), py::arg("dtype"), py::arg("model"),
      "A writable array for states of a model, aligned to 64 bytes, not initialised; bfloat16 as uint16. For "
      "a model on a GPU it lies in pinned memory, which is used again when the last view ends.");
  register_layer_map(module);

  // register_context() made this class.
  py::reinterpret_borrow<py::class_<Context, std::shared_ptr<Context>>>(module.attr("Context"))
      .def("decode_tapped", &run_tapped, py::arg("map"), py::arg("slots"), py::arg("dtype"),
           py::arg("outputs_only"), py::arg("batch"), py::arg("way") = "automatic",
           "Decode and capture: (array [rows, n_slots, n_embd], int32 token ids of the rows). `way` is "
           "callback, copies, hooks, or automatic: the faster one.")
      .def("extract", &run_extract, py::arg("map"), py::arg("slots"), py::arg("dtype"),
           py::arg("jobs").noconvert(), py::arg("cancelled") = std::nullopt, py::arg("way") = "callback",
           "Capture without logits: jobs are (tokens, begin, end, pooling, out as bytes), one sequence each. "
           "`cancelled` is called about every 50 ms; when it returns True, CancelledError is raised. Returns "
           "whether all values of the last wanted layer are finite.");
}

}  // namespace llamatap::bind
