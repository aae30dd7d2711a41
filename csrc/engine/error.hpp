#pragma once

#include <stdexcept>
#include <string>

namespace llamatap {

/// Base of all errors thrown by the core. `python_name` is the class of `llamatap.errors` that the
/// bindings raise for it.
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

/// The model, the build or the engine cannot do this.
struct Unsupported : Error {
  explicit Unsupported(const std::string& message) : Error("UnsupportedError", message) {}
};

/// The file cannot be loaded as a model.
struct ModelLoadFailed : Error {
  explicit ModelLoadFailed(const std::string& message) : Error("ModelLoadError", message) {}
};

/// There is no room left in the context's memory; it is unchanged.
struct ContextFull : Error {
  explicit ContextFull(const std::string& message) : Error("ContextFullError", message) {}
};

/// More memory would be taken than there is; nothing was allocated.
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

/// The engine reported a failure that the arguments do not explain.
struct EngineFailed : Error {
  explicit EngineFailed(const std::string& message) : Error("EngineError", message) {}
};

/// The function that the caller gave said that nobody wants the result.
struct Cancelled : Error {
  Cancelled() : Error("CancelledError", "cancelled while the engine was at work; nothing of it is kept") {}
};

/// The caller's poll asked for an end; the caller knows why.
struct Interrupted : std::exception {
  const char* what() const noexcept override { return "interrupted"; }
};

}  // namespace llamatap
