#pragma once

#include <exception>
#include <stdexcept>
#include <string>
#include <utility>

#include "engine/error.hpp"

namespace llamatap {

/// A failed assertion of the engine, on a thread with an AbortGuard.
struct EngineAborted : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// While it lives, a failed assertion of the engine on this thread throws EngineAborted instead of ending the
/// process. Only for work on this thread alone: reading files, building graphs, tokenizing. Needs the
/// engine's C sources compiled with -fexceptions. Discard objects under construction afterwards. Guards nest.
class AbortGuard {
 public:
  AbortGuard();
  ~AbortGuard();
  AbortGuard(const AbortGuard&) = delete;
  AbortGuard& operator=(const AbortGuard&) = delete;

  /// Ends the effect of the guards: from here on, other engine threads compute the same graph and wait for
  /// this one.
  static void suspend() noexcept;

 private:
  bool outer_;
};

/// Without a guard, a failed assertion prints its message to stderr and ends the process.
void install_abort_handler();

/// Runs `work` under a guard. Exceptions of the engine become EngineFailed, prefixed by `what`.
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
