#pragma once

#include <pybind11/pybind11.h>

#include <memory>
#include <utility>

#include "engine/lifetime.hpp"
#include "engine/polling.hpp"

namespace llamatap::bind {

namespace py = pybind11;

/// Releases the GIL while it lives. A thread that returns while the interpreter shuts down waits here until
/// the process ends: before Python 3.14, taking the GIL would then unwind the thread, which is fatal if an
/// exception is being thrown already.
class GilReleased {
 public:
  GilReleased() : state_(PyEval_SaveThread()) {}
  // NOLINTNEXTLINE(bugprone-unsafe-to-allow-exceptions): Python may end the thread by unwinding it.
  ~GilReleased() noexcept(false) {
    const Activity::Return back;
    PyEval_RestoreThread(state_);
  }
  GilReleased(const GilReleased&) = delete;
  GilReleased& operator=(const GilReleased&) = delete;

 private:
  PyThreadState* state_;
};

/// Whether this thread holds the GIL. (PyGILState_Check is always true once there was a sub-interpreter.)
inline bool holds_gil() {
#if PY_VERSION_HEX >= 0x030D0000
  PyThreadState* const current = PyThreadState_GetUnchecked();
#else
  PyThreadState* const current = _PyThreadState_UncheckedGet();
#endif
  return current != nullptr && current == PyGILState_GetThisThreadState();
}

/// The same object, but the last owner frees it without the GIL: freeing gigabytes takes long.
template <typename Type>
std::shared_ptr<Type> freed_without_gil(std::shared_ptr<Type> owner) {
  Type* const object = owner.get();
  return std::shared_ptr<Type>(object, [owner = std::move(owner)](Type*) mutable {
    if (!holds_gil()) {
      owner.reset();
      return;
    }
    const GilReleased released;
    // The process must not end meanwhile: freeing needs the engine's static objects.
    const Activity::Return back;
    owner.reset();
  });
}

/// A poll for calls made without the GIL: takes it, runs pending signal handlers and throws what they raise
/// (KeyboardInterrupt). Null on other threads than Python's main thread, which alone runs handlers. Call it
/// with the GIL held.
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

}  // namespace llamatap::bind
