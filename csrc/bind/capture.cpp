#include "bind/bind.hpp"
#include "capture/layer_map.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

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

py::array view_of(const std::shared_ptr<Block>& block, const std::vector<py::ssize_t>& shape, DType dtype,
                  bool writable) {
  const py::dtype type = dtype == DType::f32   ? py::dtype::of<float>()
                         : dtype == DType::f16 ? py::dtype("float16")
                                               : py::dtype::of<uint16_t>();
  auto owner = std::make_unique<std::shared_ptr<Block>>(block);
  const py::capsule base(owner.get(),
                         [](void* pointer) { delete static_cast<std::shared_ptr<Block>*>(pointer); });
  owner.release();  // the capsule deletes it
  py::array array(type, shape, {}, block->data(), base);
  if (!writable) py::detail::array_proxy(array.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return array;
}

void register_capture(py::module_& module) {
  module.def(
      "allocate",
      [](const std::vector<py::ssize_t>& shape, const std::string& dtype) {
        const DType type = parse_dtype(dtype);
        size_t bytes = item_size(type);
        for (const py::ssize_t length : shape) {
          if (length < 0) throw InvalidInput("negative length in a shape");
          if (__builtin_mul_overflow(bytes, static_cast<size_t>(length), &bytes)) throw std::bad_alloc();
        }
        return view_of(std::make_shared<Block>(bytes), shape, type, true);
      },
      py::arg("shape"), py::arg("dtype"),
      "A writable array in memory of our own, aligned to 64 bytes, not initialised; bfloat16 as uint16.");

  py::class_<LayerMap, std::shared_ptr<LayerMap>> map(
      module, "LayerMap", "Which node of the engine's graph gives each layer of a model.");
  seal(map);
  map.def_static(
         "resolve",
         [](const std::shared_ptr<Model>& model) {
           const GilReleased released;
           // Bound as a holder of non-const; nothing in it can be changed from Python.
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
          "norm's name is empty where the model has none.")
      .def_property_readonly(
          "hooked",
          [](const LayerMap& map) {
            std::vector<bool> hooked;
            for (const auto& source : map.sources()) hooked.push_back(source.hooked);
            return hooked;
          },
          "By slot: whether the engine's own hook gives the same node.");
}

}  // namespace llamatap::bind
