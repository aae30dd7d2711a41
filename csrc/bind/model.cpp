#include "engine/model/model.hpp"

#include "bind/bind.hpp"
#include "bind/options.hpp"

namespace llamatap::bind {

namespace {

using Value = std::variant<bool, int64_t, uint64_t, double, py::str, std::vector<bool>, std::vector<int64_t>,
                           std::vector<uint64_t>, std::vector<double>, std::vector<py::str>>;

std::map<std::string, Value> to_python(const Metadata& metadata) {
  std::map<std::string, Value> result;
  for (const auto& [key, value] : metadata) {
    result[std::string(to_str(key))] = std::visit(
        [](const auto& content) -> Value {
          using Content = std::decay_t<decltype(content)>;
          if constexpr (std::is_same_v<Content, std::string>) {
            return to_str(content);
          } else if constexpr (std::is_same_v<Content, std::vector<std::string>>) {
            std::vector<py::str> strings;
            strings.reserve(content.size());
            for (const auto& text : content) strings.push_back(to_str(text));
            return strings;
          } else {
            return content;
          }
        },
        value);
  }
  return result;
}

using Bound = py::class_<Model, std::shared_ptr<Model>>;

constexpr std::tuple kOptions{
    Option{"n_gpu_layers", &ModelOptions::n_gpu_layers},
    Option{"use_mmap", &ModelOptions::use_mmap},
    Option{"load_mtp", &ModelOptions::load_mtp},
    Option{"vocab_only", &ModelOptions::vocab_only},
    Option{"weights", &ModelOptions::weights},
    Option{"memory_available", &ModelOptions::memory_available},
};

std::shared_ptr<Model> load_model(const py::bytes& given_path, const py::object& progress,
                                  const ModelOptions& options) {
  const std::string path = given_path;
  const std::function<bool(float)> report = [&progress](float fraction) {
    if (Activity::ending()) return true;
    const py::gil_scoped_acquire gil;
    if (PyErr_CheckSignals() != 0) throw py::error_already_set();
    if (!progress.is_none()) progress(fraction);
    return false;
  };
  // `progress` is only called with the GIL re-acquired.
  const GilReleased released;
  return freed_without_gil(Model::load(path, options, report));
}

void def_load(Bound& bound) {
  def_with_options(kOptions, [&](const auto&... options) {
    bound.def_static("load", with_options<py::bytes, py::object>(kOptions, &load_model), py::arg("path"),
                     py::kw_only(), py::arg("progress"), options...,
                     "Load a GGUF file. `progress(fraction)` is called about every 50 ms.");
  });
}

void def_embeddings(Bound& bound) {
  bound.def(
      "token_embeddings",
      [](const Model& model, const Ints& tokens) {
        const auto ids = to_vector(tokens);
        std::vector<float> values;
        {
          const GilReleased released;
          values = model.token_embeddings(ids);
        }
        const py::ssize_t rows = tokens.size();
        const py::ssize_t width = rows == 0 ? model.n_embd() : static_cast<py::ssize_t>(values.size()) / rows;
        return py::array_t<float>({rows, width}, values.data());
      },
      py::arg("tokens").noconvert());
}

void def_properties(Bound& bound) {
  bound.def_property_readonly("metadata", [](const Model& model) { return to_python(model.metadata()); })
      .def_property_readonly("arch", [](const Model& model) { return to_str(model.arch()); })
      .def_property_readonly("description", [](const Model& model) { return to_str(model.description()); })
      .def_property_readonly("file_type", &Model::file_type)
      .def_property_readonly("n_layer", &Model::n_layer)
      .def_property_readonly("n_embd", &Model::n_embd)
      .def_property_readonly("n_embd_input", &Model::n_embd_input)
      .def_property_readonly("n_ctx_train", &Model::n_ctx_train)
      .def_property_readonly("n_params", &Model::n_params)
      .def_property_readonly("size_bytes", &Model::size_bytes)
      .def_property_readonly("is_recurrent", &Model::is_recurrent)
      .def_property_readonly("is_hybrid", &Model::is_hybrid)
      .def_property_readonly("n_swa", &Model::n_swa, "Width of its sliding window; 0 without one.")
      .def_property_readonly("batches_sequences", &Model::batches_sequences)
      .def_property_readonly("device_names", &Model::device_names)
      .def_property_readonly("n_vocab", [](const Model& model) { return model.vocab().size(); })
      .def_property_readonly("adds_bos", [](const Model& model) { return model.vocab().adds_bos(); })
      .def_property_readonly("adds_eos", [](const Model& model) { return model.vocab().adds_eos(); })
      .def_property_readonly("bos", [](const Model& model) { return model.vocab().bos(); })
      .def_property_readonly("eos", [](const Model& model) { return model.vocab().eos(); })
      .def_property_readonly("eot", [](const Model& model) { return model.vocab().eot(); });
}

void def_tokenizer(Bound& bound) {
  bound
      .def(
          "tokenize",
          [](const Model& model, const py::bytes& utf8, bool add_special, bool parse_special) {
            const std::string text = utf8;
            std::vector<int32_t> tokens;
            {
              const GilReleased released;
              tokens = model.vocab().tokenize(text, add_special, parse_special);
            }
            return to_array(tokens);
          },
          py::arg("utf8"), py::arg("add_special"), py::arg("parse_special"))
      .def(
          "detokenize",
          [](const Model& model, const Ints& tokens, bool remove_special, bool unparse_special) {
            return py::bytes(model.vocab().detokenize(to_vector(tokens), remove_special, unparse_special));
          },
          py::arg("tokens").noconvert(), py::arg("remove_special"), py::arg("unparse_special"))
      .def(
          "piece",
          [](const Model& model, int32_t token, bool special) {
            return py::bytes(model.vocab().piece(token, special));
          },
          py::arg("token"), py::arg("special"))
      .def(
          "token_text",
          [](const Model& model, int32_t token) { return py::bytes(model.vocab().text(token)); },
          py::arg("token"))
      .def(
          "find_tokens",
          [](const Model& model, const std::vector<std::string>& texts) {
            const GilReleased released;
            return model.vocab().find(texts);
          },
          py::arg("texts"), "For each text: the token with exactly this spelling, or None.")
      .def(
          "is_end_of_generation",
          [](const Model& model, int32_t token) { return model.vocab().is_end_of_generation(token); },
          py::arg("token"))
      .def(
          "is_control", [](const Model& model, int32_t token) { return model.vocab().is_control(token); },
          py::arg("token"))
      .def(
          "chat_template",
          [](const Model& model, const std::optional<std::string>& name) -> std::optional<py::str> {
            const auto text = model.chat_template(name);
            if (!text) return std::nullopt;
            return to_str(*text);
          },
          py::arg("name") = py::none());
}

}  // namespace

void register_model(py::module_& module) {
  module.def(
      "read_metadata",
      [](const py::bytes& given_path) {
        const std::string path = given_path;
        Metadata metadata;
        {
          const GilReleased released;
          metadata = GgufFile(path).metadata();
        }
        return to_python(metadata);
      },
      py::arg("path"), "The metadata of a GGUF file, without arrays of more than 1,024 elements.");

  Bound bound(module, "Model", "A loaded model.");
  seal(bound);
  def_load(bound);
  def_properties(bound);
  def_tokenizer(bound);
  def_embeddings(bound);
}

}  // namespace llamatap::bind
