#include "engine/abort.hpp"

#include <ggml.h>
#include <unistd.h>

#include <cstring>

namespace llamatap {

namespace {

thread_local bool throws = false;

void on_abort(const char* message) {
  if (throws) throw EngineAborted(message);
  const char note[] = "\nllamatap: the engine aborted the process; please report this\n";
  if (write(STDERR_FILENO, message, std::strlen(message)) < 0) return;
  if (write(STDERR_FILENO, note, sizeof note - 1) < 0) return;
}

}  // namespace

AbortGuard::AbortGuard() : outer_(std::exchange(throws, true)) {}
AbortGuard::~AbortGuard() { throws = outer_; }
void AbortGuard::suspend() noexcept { throws = false; }

void install_abort_handler() { ggml_set_abort_callback(&on_abort); }

}  // namespace llamatap
