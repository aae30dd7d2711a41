#include "engine/backend.hpp"

#include <pybind11/typing.h>

#include "bind/bind.hpp"
#include "build_config.hpp"
#include "engine/log.hpp"

namespace llamatap::bind {

namespace {

void def_lifetime(py::module_& module) {
  module.def(
      "load_backends",
      [](const std::string& folder) {
        // Loading a GPU back end can take a second.
        const GilReleased released;
        load_backends(folder);
      },
      py::arg("folder"), "Load the engine's back ends from a folder, once per process.");

  module.def(
      "shut_down",
      [] {
        const GilReleased released;
        Activity::end();
      },
      "Stop all running work and refuse new work, before the interpreter exits.");
}

void def_facts(py::module_& module) {
  module.def(
      "devices",
      [] {
        py::typing::List<py::typing::Dict<py::str, py::object>> result;
        for (const auto& device : devices()) {
          py::typing::Dict<py::str, py::object> item;
          item["name"] = device.name;
          item["description"] = device.description;
          item["kind"] = device.kind;
          item["memory_total"] = device.memory_total;
          result.append(item);
        }
        return result;
      },
      "Devices of the loaded back ends.");

  module.def("cpu_features", &cpu_features,
             "CPU features that the CPU back end was compiled for: (feature, value) pairs.");

  module.def(
      "build_info",
      [] {
        return std::map<std::string, std::string>{
            {"version", LLAMATAP_VERSION},   {"engine_commit", LLAMATAP_ENGINE_COMMIT},
            {"compiler", LLAMATAP_COMPILER}, {"build_type", LLAMATAP_BUILD_TYPE},
            {"sanitize", LLAMATAP_SANITIZE}, {"portable", LLAMATAP_PORTABLE},
            {"openmp", LLAMATAP_OPENMP},
        };
      },
      "Versions and options of this build.");
}

}  // namespace

void register_backend(py::module_& module) {
  def_lifetime(module);
  def_facts(module);
  module.def(
      "drain_log",
      [] {
        std::vector<std::pair<int, py::str>> lines;
        for (const auto& line : drain_log()) {
          // Python's logging levels: 10 debug, 20 info, 30 warning, 40 error.
          lines.emplace_back(10 * (static_cast<int>(line.level) + 1), to_str(line.text));
        }
        return lines;
      },
      "Log lines of the engine since the last call: (logging level, text), oldest first.");
}

}  // namespace llamatap::bind
