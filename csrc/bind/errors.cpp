#include <new>

#include "bind/bind.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

void register_errors(py::module_&) {
  // NOLINTNEXTLINE(performance-unnecessary-value-param): pybind11 takes a plain function.
  py::register_exception_translator([](std::exception_ptr pending) {
    try {
      if (pending) std::rethrow_exception(pending);
    } catch (const Error& error) {
      // The classes are defined in Python; each C++ error names its own.
      const auto errors = py::module_::import("llamatap.errors");
      py::set_error(errors.attr(error.python_name()), to_str(error.what()));
    } catch (const std::bad_alloc&) {
      const auto errors = py::module_::import("llamatap.errors");
      py::set_error(errors.attr("OutOfMemoryError"), "the system gives this process no more memory");
    } catch (const Interrupted&) {
      py::set_error(PyExc_KeyboardInterrupt, "interrupted");
    }
  });
}

}  // namespace llamatap::bind
