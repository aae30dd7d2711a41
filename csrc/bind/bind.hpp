#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "capture/block.hpp"
#include "capture/dtype.hpp"
#include "capture/pool.hpp"
#include "engine/error.hpp"
#include "engine/lifetime.hpp"
#include "engine/polling.hpp"

namespace llamatap::bind {

namespace py = pybind11;

void register_errors(py::module_& module);
void register_backend(py::module_& module);
void register_model(py::module_& module);
void register_batch(py::module_& module);
void register_context(py::module_& module);
void register_capture(py::module_& module);
void register_sampler(py::module_& module);
void register_draft(py::module_& module);
void register_logprobs(py::module_& module);

/// Releases the GIL while it lives. A thread that comes back when the interpreter is going down waits here
/// for the end of the process: before Python 3.14, taking the GIL then would end the thread by unwinding it,
/// which nothing survives that an exception of ours is unwinding already.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  ~GilReleased() noexcept(false) {
    const Activity::Return back;
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

/// Whether this thread holds the GIL. (PyGILState_Check always says so once there was a sub-interpreter.)
inline bool holds_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* const current = PyThreadState_GetUnchecked();
#else
  PyThreadState* const current = _PyThreadState_UncheckedGet();
#endif
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

/// The same object, freed without the GIL by whoever drops it last: giving back gigabytes takes long.
template <typename Type>
std::shared_ptr<Type> freed_without_gil(std::shared_ptr<Type> owner) {
  Type* const object = owner.get();
  return std::shared_ptr<Type>(object, [owner = std::move(owner)](Type*) mutable {
    if (!holds_gil()) {
      owner.reset();
      return;
    }
    const GilReleased released;
    // The process must not end meanwhile: the engine's static objects are needed.
    const Activity::Return back;
    owner.reset();
  });
}

/// A poll for calls made without the GIL: takes it, lets pending signal handlers run and throws what they
/// raise (KeyboardInterrupt). Python runs handlers on its main thread only; elsewhere there is none. To be
/// called with the GIL held.
inline Poll signal_poll() {
  const auto threading = py::module_::import("threading");
  const bool is_main = threading.attr("get_ident")().equal(threading.attr("main_thread")().attr("ident"));
  if (!is_main) return nullptr;
  return [] {
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    return false;
  };
}

/// Text from the engine or from a model file, which may hold any bytes: what is no UTF-8 becomes U+FFFD.
inline py::str to_str(const std::string& text) {
  return py::reinterpret_steal<py::str>(
      PyUnicode_DecodeUTF8(text.data(), static_cast<py::ssize_t>(text.size()), "replace"));
}

/// "float32", "float16" or "bfloat16".
DType parse_dtype(const std::string& name);
Pooling parse_pooling(const std::string& name);

/// A view of the block that keeps it alive. bfloat16 comes as uint16, which NumPy knows.
py::array view_of(const std::shared_ptr<Block>& block, const std::vector<py::ssize_t>& shape, DType dtype,
                  bool writable);

/// An integer of Python's or NumPy's, which may be of any size: one that 64 bits do not hold becomes the
/// nearest that they do, so that range checks speak of it. Neither a bool nor a number with a fraction.
struct Integer {
  int64_t value = 0;
};

/// Integers where nothing else will do: what is none is an InvalidInputError that says what to give, not
/// pybind11's TypeError.
struct TokenIds {
  std::vector<Integer> ids;
};

/// Takes two ways out of a class: an object made without __init__ would be memory that nobody wrote, and
/// old pickle protocols call the base class of all bindings, which ends the process.
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

/// A C-contiguous array of int32, taken as it is.
using Ints = py::array_t<int32_t, py::array::c_style>;

inline std::vector<int32_t> to_vector(const Ints& values) {
  return std::vector<int32_t>(values.data(), values.data() + values.size());
}

inline Ints to_array(const std::vector<int32_t>& values) {
  return Ints(static_cast<py::ssize_t>(values.size()), values.data());
}

}  // namespace llamatap::bind

namespace pybind11::detail {

template <>
struct type_caster<llamatap::bind::Integer> {
  PYBIND11_TYPE_CASTER(llamatap::bind::Integer, const_name("typing.SupportsIndex"));

  bool load(handle source, bool) {
    if (!source || PyBool_Check(source.ptr()) || !PyIndex_Check(source.ptr())) return false;
    const auto number = reinterpret_steal<object>(PyNumber_Index(source.ptr()));
    if (!number) {
      PyErr_Clear();
      return false;
    }
    int overflow = 0;
    const long long found = PyLong_AsLongLongAndOverflow(number.ptr(), &overflow);
    value.value = overflow > 0   ? std::numeric_limits<int64_t>::max()
                  : overflow < 0 ? std::numeric_limits<int64_t>::min()
                                 : int64_t{found};
    return true;
  }

  static handle cast(const llamatap::bind::Integer& source, return_value_policy, handle) {
    return PyLong_FromLongLong(source.value);
  }
};

template <>
struct type_caster<llamatap::bind::TokenIds> {
  PYBIND11_TYPE_CASTER(llamatap::bind::TokenIds,
                       const_name("collections.abc.Sequence[typing.SupportsIndex]"));

  bool load(handle source, bool convert) {
    make_caster<std::vector<llamatap::bind::Integer>> caster;
    if (!caster.load(source, convert)) {
      throw llamatap::InvalidInput(
          "tokens must be a list or an array of integers, such as model.tokenize(text) gives, not " +
          module_::import("reprlib").attr("repr")(source).cast<std::string>());
    }
    value.ids = cast_op<std::vector<llamatap::bind::Integer>&&>(std::move(caster));
    return true;
  }
};

}  // namespace pybind11::detail
