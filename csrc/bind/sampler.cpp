#include "engine/sampler.hpp"

#include "bind/bind.hpp"
#include "engine/context/context.hpp"
#include "engine/error.hpp"

namespace llamatap::bind {

void register_sampler(py::module_& module) {
  py::class_<Sampler> bound(module, "Sampler", "The engine's sampler chain.");
  seal(bound);
  bound
      .def(py::init([](const std::shared_ptr<Model>& model, float temperature, int32_t top_k, float top_p,
                       float min_p, float repeat_penalty, float frequency_penalty, float presence_penalty,
                       int32_t penalty_last_n, uint32_t seed,
                       const std::vector<std::pair<int32_t, float>>& logit_bias) {
             return std::make_unique<Sampler>(
                 model, SamplerOptions{temperature, top_k, top_p, min_p, repeat_penalty, frequency_penalty,
                                       presence_penalty, penalty_last_n, seed, logit_bias});
           }),
           py::arg("model"), py::kw_only(), py::arg("temperature"), py::arg("top_k"), py::arg("top_p"),
           py::arg("min_p"), py::arg("repeat_penalty"), py::arg("frequency_penalty"),
           py::arg("presence_penalty"), py::arg("penalty_last_n"), py::arg("seed"), py::arg("logit_bias"))
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
            // `logits` keeps its memory until this returns.
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
