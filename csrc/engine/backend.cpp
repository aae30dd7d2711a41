#include "engine/backend.hpp"

#include <dlfcn.h>
#include <ggml-backend.h>
#include <ggml-cpu.h>
#include <llama.h>

#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "engine/error.hpp"
#include "engine/log.hpp"

namespace llamatap {

namespace {

namespace fs = std::filesystem;

// Back ends are named libllamatap-ggml-<kind>[-<variant>].so.
constexpr char kPrefix[] = "libllamatap-ggml-";

struct Unload {
  void operator()(void* library) const { dlclose(library); }
};
using Library = std::unique_ptr<void, Unload>;

struct Candidate {
  Library library;
  int score = 0;
  fs::path path;
};

Candidate examine(const fs::path& path) {
  using ScoreFunction = int (*)();
  Candidate candidate;
  candidate.library.reset(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL));
  if (candidate.library == nullptr) return candidate;
  const auto function = reinterpret_cast<ScoreFunction>(dlsym(candidate.library.get(), "ggml_backend_score"));
  // A back end without a score is the only one of its kind.
  candidate.score = function != nullptr ? function() : 1;
  candidate.path = path;
  return candidate;
}

/// Registers the library; null when it holds no back end.
ggml_backend_reg_t load(Candidate candidate) {
  if (candidate.score == 0) return nullptr;
  ggml_backend_reg_t registry = ggml_backend_load(candidate.path.c_str());
  // Keep a used library loaded: a GPU's runtime does not survive unloading.
  if (registry != nullptr) static_cast<void>(candidate.library.release());
  return registry;
}

ggml_backend_reg_t cpu_registry() {
  ggml_backend_dev_t device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
  if (device == nullptr) throw EngineFailed("no CPU back end is loaded");
  return ggml_backend_dev_backend_reg(device);
}

template <typename Function>
Function cpu_function(const char* name) {
  auto* address = ggml_backend_reg_get_proc_address(cpu_registry(), name);
  if (address == nullptr) throw EngineFailed(std::string("the CPU back end has no ") + name);
  return reinterpret_cast<Function>(address);
}

}  // namespace

void load_backends(const std::string& folder) {
  static std::mutex mutex;
  static bool loaded = false;
  const std::lock_guard<std::mutex> lock(mutex);
  if (loaded) return;

  std::map<std::string, Candidate> best;
  for (const auto& entry : fs::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    if (name.rfind(kPrefix, 0) != 0) continue;
    const auto rest = name.substr(sizeof kPrefix - 1);
    const auto kind = rest.substr(0, rest.find_first_of("-."));
    if (kind == "base") continue;
    auto candidate = examine(entry.path());
    auto& choice = best[kind];
    if (candidate.score > choice.score) choice = std::move(candidate);
  }
  // The engine lists devices in the order of registration: the CPU goes last.
  auto cpu = best.extract("cpu");
  for (auto& [kind, choice] : best) load(std::move(choice));
  const LogScope log;
  if (cpu.empty() || load(std::move(cpu.mapped())) == nullptr) {
    throw EngineFailed("no CPU back end for this machine in " + folder +
                       (log.text().empty() ? "" : ": " + log.text()));
  }
  llama_backend_init();
  loaded = true;
}

std::vector<DeviceInfo> devices() {
  std::vector<DeviceInfo> result;
  for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
    ggml_backend_dev_t device = ggml_backend_dev_get(i);
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    const char* kind = "accel";
    switch (ggml_backend_dev_type(device)) {
      case GGML_BACKEND_DEVICE_TYPE_CPU: kind = "cpu"; break;
      case GGML_BACKEND_DEVICE_TYPE_GPU: kind = "gpu"; break;
      case GGML_BACKEND_DEVICE_TYPE_IGPU: kind = "igpu"; break;
      default: break;
    }
    result.push_back({ggml_backend_dev_name(device), ggml_backend_dev_description(device), kind, total});
  }
  return result;
}

std::vector<std::pair<std::string, std::string>> cpu_features() {
  std::vector<std::pair<std::string, std::string>> result;
  const auto get = cpu_function<ggml_backend_get_features_t>("ggml_backend_get_features");
  for (const auto* feature = get(cpu_registry()); feature->name != nullptr; ++feature) {
    result.emplace_back(feature->name, feature->value);
  }
  return result;
}

Threadpool make_threadpool(int n_threads) {
  auto params = ggml_threadpool_params_default(n_threads);
  // Do not spin while waiting for work: that takes cores from other contexts. With spinning, a draft round
  // (two contexts in turn) took 3 times as long on 2 cores.
  params.poll = 0;
  const auto create = cpu_function<decltype(&ggml_threadpool_new)>("ggml_threadpool_new");
  const auto destroy = cpu_function<decltype(&ggml_threadpool_free)>("ggml_threadpool_free");
  Threadpool pool(create(&params), destroy);
  if (!pool) throw EngineFailed("cannot start " + std::to_string(n_threads) + " threads");
  return pool;
}

}  // namespace llamatap
