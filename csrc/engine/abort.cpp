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
  ssize_t written = write(STDERR_FILENO, message, std::strlen(message));
  written = write(STDERR_FILENO, note, sizeof note - 1);
  (void)written;
}

}  // namespace

AbortGuard::AbortGuard() : outer_(std::exchange(throws, true)) {}
AbortGuard::~AbortGuard() { throws = outer_; }
void AbortGuard::suspend() noexcept { throws = false; }

void install_abort_handler() { ggml_set_abort_callback(&on_abort); }

}  // namespace llamatap
