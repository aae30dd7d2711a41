#include "engine/context/context.hpp"

#include "bind/bind.hpp"
#include "bind/options.hpp"

namespace llamatap::bind {

namespace {

constexpr auto kContextOptions =
    std::tuple_cat(kDraftContextOptions, std::tuple{
                                             Option{"n_rs_seq", &ContextOptions::n_rs_seq},
                                             Option{"n_outputs_max", &ContextOptions::n_outputs_max},
                                             Option{"swa_full", &ContextOptions::swa_full},
                                         });

std::shared_ptr<Context> make_context(const std::shared_ptr<Model>& model, const ContextOptions& options) {
  const GilReleased released;
  return freed_without_gil(std::make_shared<Context>(model, options));
}

using Bound = py::class_<Context, std::shared_ptr<Context>>;

/// A method of KvMemory as a function of its Context.
template <typename Result, typename... Args>
auto locked(Result (KvMemory::*method)(Args...)) {
  return [method](Context& context, Args... args) {
    const GilReleased released;
    const auto held = context.memory();
    return (held.memory.*method)(args...);
  };
}

void def_memory(Bound& bound) {
  bound.def("memory_clear", locked(&KvMemory::clear))
      .def("memory_remove", locked(&KvMemory::remove), py::arg("seq"), py::arg("p0"), py::arg("p1"))
      .def("memory_copy", locked(&KvMemory::copy), py::arg("source"), py::arg("target"), py::arg("p0"),
           py::arg("p1"))
      .def("memory_keep", locked(&KvMemory::keep), py::arg("seq"))
      .def("memory_shift", locked(&KvMemory::shift), py::arg("seq"), py::arg("p0"), py::arg("p1"),
           py::arg("delta"))
      .def(
          "memory_first", [](Context& context, int32_t seq) { return context.memory()->first(seq); },
          py::arg("seq"))
      .def(
          "memory_last", [](Context& context, int32_t seq) { return context.memory()->last(seq); },
          py::arg("seq"))
      .def(
          "save",
          [](Context& context, int32_t seq) {
            std::string state;
            {
              const GilReleased released;
              state = context.memory()->save(seq);
            }
            return py::bytes(state);
          },
          py::arg("seq"))
      .def(
          "restore",
          [](Context& context, int32_t seq, const py::bytes& given) {
            const std::string state = given;
            const GilReleased released;
            context.memory()->restore(seq, state);
          },
          py::arg("seq"), py::arg("state"));
}

}  // namespace

void register_context(py::module_& module) {
  Bound bound(module, "Context", "A model with memory.");
  seal(bound);
  def_with_options(kContextOptions, [&](const auto&... options) {
    bound.def(py::init(with_options<std::shared_ptr<Model>>(kContextOptions, &make_context)),
              py::arg("model"), py::kw_only(), options...);
  });
  bound.def_property_readonly("n_ctx", &Context::n_ctx)
      .def_property_readonly("n_ctx_seq", &Context::n_ctx_seq)
      .def_property_readonly("position_limit",
                             [](const Context& context) { return context.model()->position_limit(); })
      .def_property_readonly("engine_seconds", &Context::engine_seconds)
      .def_property_readonly("nodes_seen", &Context::nodes_seen)
      .def_property_readonly("zeroed_cells", &Context::zeroed_cells)
      .def_property_readonly("n_batch", &Context::n_batch)
      .def_property_readonly("n_ubatch", &Context::n_ubatch)
      .def_property_readonly("flash_attention", &Context::flash_attention)
      .def_property_readonly("has_memory", &Context::has_memory)
      .def_property_readonly("causal", &Context::causal)
      .def(
          "decode",
          [](Context& context, const Batch& batch) {
            // Another thread may change the batch while the engine computes.
            // NOLINTNEXTLINE(performance-unnecessary-copy-initialization)
            const Batch copy = batch;
            const Poll poll = signal_poll();
            const GilReleased released;
            context.decode(copy, nullptr, poll);
          },
          py::arg("batch"))
      .def(
          "logits",
          [](const Context& context, int32_t row) {
            py::array_t<float> values(context.model()->vocab().size());
            context.copy_logits(row, values.mutable_data());
            return values;
          },
          py::arg("row"));
  def_memory(bound);
}

}  // namespace llamatap::bind
