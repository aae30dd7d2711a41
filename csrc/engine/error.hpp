#pragma once

#include <stdexcept>
#include <string>

namespace llamatap {

/// Base of all errors of the core. `python_name`: the class of `llamatap.errors` that the bindings raise.
class Error : public std::runtime_error {
 public:
  Error(const char* python_name, const std::string& message)
      : std::runtime_error(message), python_name_(python_name) {}

  const char* python_name() const noexcept { return python_name_; }

 private:
  const char* python_name_;
};

/// The caller's arguments are wrong; nothing was changed.
struct InvalidInput : Error {
  explicit InvalidInput(const std::string& message) : Error("InvalidInputError", message) {}
};

/// The model computed NaN or infinity.
struct NotFinite : Error {
  explicit NotFinite(const std::string& message) : Error("NotFiniteError", message) {}
};

/// Not possible with this model, build or engine.
struct Unsupported : Error {
  explicit Unsupported(const std::string& message) : Error("UnsupportedError", message) {}
};

/// The file cannot be loaded as a model.
struct ModelLoadFailed : Error {
  explicit ModelLoadFailed(const std::string& message) : Error("ModelLoadError", message) {}
};

/// The context's memory has no room; it is unchanged.
struct ContextFull : Error {
  explicit ContextFull(const std::string& message) : Error("ContextFullError", message) {}
};

/// Not enough memory; nothing was allocated.
struct OutOfMemory : Error {
  explicit OutOfMemory(const std::string& message) : Error("OutOfMemoryError", message) {}
};

/// Another thread is using the object.
struct Busy : Error {
  explicit Busy(const std::string& message) : Error("BusyError", message) {}
};

/// The object was closed.
struct Closed : Error {
  explicit Closed(const std::string& message) : Error("ClosedError", message) {}
};

/// A failure inside the engine.
struct EngineFailed : Error {
  explicit EngineFailed(const std::string& message) : Error("EngineError", message) {}
};

/// The caller's `cancelled` function returned true.
struct Cancelled : Error {
  Cancelled()
      : Error("CancelledError", "cancelled while the engine was computing; the results were discarded") {}
};

/// The caller's poll asked to stop.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

}  // namespace llamatap
