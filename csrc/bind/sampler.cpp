#include "engine/sampler.hpp"

#include "bind/bind.hpp"
#include "bind/options.hpp"
#include "engine/context/context.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

namespace {

constexpr std::tuple kOptions{
    Option{"temperature", &SamplerOptions::temperature},
    Option{"top_k", &SamplerOptions::top_k},
    Option{"top_p", &SamplerOptions::top_p},
    Option{"min_p", &SamplerOptions::min_p},
    Option{"repeat_penalty", &SamplerOptions::repeat_penalty},
    Option{"frequency_penalty", &SamplerOptions::frequency_penalty},
    Option{"presence_penalty", &SamplerOptions::presence_penalty},
    Option{"penalty_last_n", &SamplerOptions::penalty_last_n},
    Option{"seed", &SamplerOptions::seed},
    Option{"logit_bias", &SamplerOptions::logit_bias},
};

std::unique_ptr<Sampler> make_sampler(const std::shared_ptr<Model>& model, const SamplerOptions& options) {
  return std::make_unique<Sampler>(model, options);
}

}  // namespace

void register_sampler(py::module_& module) {
  py::class_<Sampler> bound(module, "Sampler", "The engine's sampler chain.");
  seal(bound);
  def_with_options(kOptions, [&](const auto&... options) {
    bound.def(py::init(with_options<std::shared_ptr<Model>>(kOptions, &make_sampler)), py::arg("model"),
              py::kw_only(), options...);
  });
  bound
      .def(
          "sample",
          [](Sampler& sampler, const Context& context, int32_t row) {
            const GilReleased released;
            const auto held = sampler.hold();
            std::vector<float> logits(static_cast<size_t>(context.model()->vocab().size()));
            context.copy_logits(row, logits.data());
            return sampler.sample(logits.data(), context.model()->vocab().size());
          },
          py::arg("context"), py::arg("row"))
      .def(
          "sample_logits",
          [](Sampler& sampler, const py::array_t<float, py::array::c_style>& logits) {
            if (logits.ndim() != 1) throw InvalidInput("logits must be a vector");
            // `logits` keeps its memory alive.
            const float* values = logits.data();
            const auto n = static_cast<int32_t>(logits.size());
            const GilReleased released;
            const auto held = sampler.hold();
            return sampler.sample(values, n);
          },
          py::arg("logits").noconvert())
      .def(
          "accept",
          [](Sampler& sampler, int32_t token) {
            const auto held = sampler.hold();
            sampler.accept(token);
          },
          py::arg("token"))
      .def("reset", [](Sampler& sampler) {
        const auto held = sampler.hold();
        sampler.reset();
      });
}

}  // namespace llamatap::bind
