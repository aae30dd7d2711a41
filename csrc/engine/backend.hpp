#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

struct ggml_threadpool;

namespace llamatap {

/// Loads the engine's back ends from `folder`: of each kind (cuda, metal, cpu, ...) the library with the best
/// score on this machine. Only the first call has an effect. Throws EngineFailed when no CPU back end can be
/// loaded.
void load_backends(const std::string& folder);

struct DeviceInfo {
  std::string name;
  std::string description;
  std::string kind;  // "cpu", "gpu", "igpu" or "accel"
  uint64_t memory_total;
};

std::vector<DeviceInfo> devices();

/// CPU features that the loaded CPU back end was compiled for: (feature, value) pairs.
std::vector<std::pair<std::string, std::string>> cpu_features();

/// Worker threads. Without a pool, the engine starts new threads for each part of a graph.
using Threadpool = std::unique_ptr<ggml_threadpool, void (*)(ggml_threadpool*)>;

Threadpool make_threadpool(int n_threads);

}  // namespace llamatap
