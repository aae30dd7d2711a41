#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <string>
#include <vector>

#include "bind/gil.hpp"
#include "capture/block.hpp"

namespace llamatap::bind {

namespace py = pybind11;

void register_errors(py::module_& module);
void register_backend(py::module_& module);
void register_model(py::module_& module);
void register_batch(py::module_& module);
void register_context(py::module_& module);
void register_capture(py::module_& module);
void register_sampler(py::module_& module);
void register_speculative(py::module_& module);
void register_drafter(py::module_& module);
void register_verify(py::module_& module);
void register_logprobs(py::module_& module);

/// Text from the engine or a model file; bytes that are not UTF-8 become U+FFFD.
inline py::str to_str(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

/// Makes two uses of a bound class raise TypeError instead of crashing: objects made without __init__
/// (uninitialised memory), and pickling by old protocols, which call the base class of all bindings.
template <typename Class>
void seal(Class& bound) {
  using Type = typename Class::type;
  py::detail::get_type_info(typeid(Type), /*throw_if_missing=*/true)->operator_new = [](size_t) -> void* {
    throw py::type_error("__init__() of this object was never called");
  };
  bound.def("__reduce__", [](const py::object& self) -> py::object {
    throw py::type_error(py::type::of(self).attr("__name__").cast<std::string>() +
                         " objects cannot be copied or pickled");
  });
}

/// C-contiguous arrays, not converted.
using Ints = py::array_t<int32_t, py::array::c_style>;
using Floats = py::array_t<float, py::array::c_style>;

inline std::vector<int32_t> to_vector(const Ints& values) {
  return std::vector<int32_t>(values.data(), values.data() + values.size());
}

inline Ints to_array(const std::vector<int32_t>& values) {
  return Ints(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace llamatap::bind
