#include "bind/bind.hpp"
#include "engine/abort.hpp"
#include "engine/log.hpp"

PYBIND11_MODULE(_core, module) {
  using namespace llamatap::bind;
  module.doc() = "llamatap's native core. Private: use the llamatap package.";
  llamatap::install_log_sink();
  llamatap::install_abort_handler();
  llamatap::Activity::owner();
  register_errors(module);
  register_backend(module);
  register_model(module);
  register_batch(module);
  register_context(module);
  register_capture(module);
  register_sampler(module);
  register_speculative(module);
  register_drafter(module);
  register_verify(module);
  register_logprobs(module);
}
