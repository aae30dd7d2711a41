#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/error.hpp"

namespace llamatap {

/// An assertion of the engine that failed on a thread with an AbortGuard.
struct EngineAborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// While it lives, an assertion of the engine that fails on this thread throws EngineAborted instead of
/// ending the process. Only for what the engine does on this thread alone: reading files, building graphs,
/// cutting text into tokens. Its C sources are compiled with -fexceptions. Whatever was under construction
/// must be discarded afterwards. Guards nest.
class AbortGuard {
 public:
  AbortGuard();
  ~AbortGuard();
  AbortGuard(const AbortGuard&) = delete;
  AbortGuard& operator=(const AbortGuard&) = delete;

  /// Ends the effect of the guards: from here on other threads of the engine work on the same graph and wait
  /// for this one.
  static void suspend() noexcept;

 private:
  bool outer_;
};

/// Without a guard, a failed assertion prints its message to stderr and ends the process.
void install_abort_handler();

/// Runs `work` under a guard. Exceptions of the engine become EngineFailed, with `what` in front.
template <typename Work>
auto guarded(const char* what, Work&& work) {
  const AbortGuard guard;
  try {
    return std::forward<Work>(work)();
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;
  } catch (const std::exception& error) {
    throw EngineFailed(std::string(what) + ": " + error.what());
  }
}

}  // namespace llamatap
