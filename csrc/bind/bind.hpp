#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <string>
#include <vector>

#include "capture/block.hpp"
#include "capture/recorder.hpp"
#include "engine/worker.hpp"

namespace llamatap::bind {

namespace py = pybind11;

void register_errors(py::module_& module);
void register_backend(py::module_& module);
void register_model(py::module_& module);
void register_batch(py::module_& module);
void register_context(py::module_& module);
void register_capture(py::module_& module);
void register_sampler(py::module_& module);

/// A poll for calls made without the GIL: takes it, lets pending signal handlers run and throws what
/// they raise (KeyboardInterrupt). Python runs handlers on its main thread only; elsewhere it does nothing.
inline Poll signal_poll() {
  return [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return false;
  };
}

/// "float32", "float16" or "bfloat16".
DType parse_dtype(const std::string& name);
Pooling parse_pooling(const std::string& name);

/// A view of the block that keeps it alive. bfloat16 comes as uint16, which NumPy knows.
py::array view_of(const std::shared_ptr<Block>& block, const std::vector<py::ssize_t>& shape, DType dtype,
                  bool writable);

/// A C-contiguous array of int32, taken as it is.
using Ints = py::array_t<int32_t, py::array::c_style>;

inline std::vector<int32_t> to_vector(const Ints& values) {
  return std::vector<int32_t>(values.data(), values.data() + values.size());
}

inline Ints to_array(const std::vector<int32_t>& values) {
  return Ints(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace llamatap::bind
