#include "engine/context/context_memory_check.hpp"

#include <ggml-backend.h>
#include <llama-cpp.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <vector>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/memory_size.hpp"
#include "engine/model/model.hpp"
#include "engine/private/footprint.hpp"
#include "engine/private/model_weights.hpp"

namespace llamatap {

namespace {

// The engine's metadata of a cache cell (position, sequences, ...), for any model.
constexpr uint64_t kCellBytes = 48;
// Planning a context allocates this metadata; so for larger contexts, the need is extrapolated from two
// smaller ones.
constexpr uint32_t kMaxPlannedCtx = 1U << 20;
// Share of the available memory for a suggested n_ctx: less may be free when the user tries it.
constexpr double kOffered = 0.97;

/// The machine's memory or a GPU's.
struct Place {
  std::string name;
  double needed = 0;
  double available = 0;

  double missing() const { return needed - available; }
  double missing_of_offer() const { return needed - kOffered * available; }
};

/// The need in each memory.
using Need = std::vector<Place>;

const Place& tightest(const Need& need) {
  return *std::max_element(need.begin(), need.end(),
                           [](const Place& a, const Place& b) { return a.missing() < b.missing(); });
}

bool fits(const Need& need) { return tightest(need).missing() <= 0; }

double missing_of_offer(const Need& need) {
  double most = need.front().missing_of_offer();
  for (const auto& place : need) most = std::max(most, place.missing_of_offer());
  return most;
}

/// Plans contexts with the engine, without allocating them.
class Planner {
 public:
  Planner(const Model& model, const llama_context_params& params, uint64_t available)
      : model_(Model::without_weights(model.path(), model.options())),
        params_(params),
        available_(available) {
    n_outputs_ = std::min(params.n_outputs_max, params.n_batch);
    output_bytes_ = 4.0 * model.vocab().size();
    // The system commits CPU memory on first use, and few batches have outputs for all tokens; GPU memory is
    // committed at once.
    if (!model.on_gpu()) params_.n_outputs_max = params.n_seq_max;
  }

  bool works() const { return model_ != nullptr; }

  /// n_ctx is rounded up to a multiple of this.
  uint32_t step() const { return params_.kv_unified ? 256 : 256 * params_.n_seq_max; }

  /// No value when the engine cannot make such a context.
  std::optional<Need> need(uint32_t n_ctx) const {
    // The metadata must take a small part of the available memory only.
    const auto most = std::min<double>(kMaxPlannedCtx, available_ / (16 * kCellBytes));
    const auto half = std::max(step(), static_cast<uint32_t>(most / 2) / step() * step());
    if (n_ctx <= 2 * half) return planned(n_ctx);
    const auto low = planned(half);
    auto high = planned(2 * half);
    if (!low || !high) return std::nullopt;
    const double more = (static_cast<double>(n_ctx) - 2 * half) / half;
    for (size_t i = 0; i < high->size(); ++i) {
      (*high)[i].needed += ((*high)[i].needed - (*low)[i].needed) * more;
    }
    return high;
  }

  /// The largest n_ctx below `n_ctx` that fits with a margin; 0 when none does.
  uint32_t largest(uint32_t n_ctx, const Need& of_it) const {
    double low = step();
    double high = n_ctx;
    const auto smallest = need(step());
    if (!smallest || missing_of_offer(*smallest) > 0) return 0;
    double low_missing = missing_of_offer(*smallest);
    double high_missing = missing_of_offer(of_it);
    // The need is nearly linear in n_ctx, so the first guess is close.
    for (int i = 0; i < 6 && high - low > step(); ++i) {
      const double guess = low + (high - low) * -low_missing / (high_missing - low_missing);
      const double next = std::clamp(std::floor(guess / step()) * step(), low + step(), high - 1);
      const auto found = need(static_cast<uint32_t>(next));
      if (!found) return 0;
      const double missing = missing_of_offer(*found);
      const bool is_close = missing <= 0 && next - low < 0.01 * next && i > 0;
      (missing <= 0 ? low : high) = next;
      (missing <= 0 ? low_missing : high_missing) = missing;
      if (is_close) break;
    }
    return static_cast<uint32_t>(low);
  }

 private:
  std::optional<Need> planned(uint32_t n_ctx) const {
    // Planning does allocate recurrent states: check with 1 sequence whether all of them fit.
    if (params_.n_seq_max > 1) {
      const auto one = made(256, 1);
      if (!one) return std::nullopt;
      const double states = static_cast<double>(internals::recurrent_bytes(one.get())) * params_.n_seq_max;
      if (states > available_) return Need{{"", states, available_}};
    }
    const auto context = made(n_ctx, params_.n_seq_max);
    if (!context) return std::nullopt;
    const auto footprint = internals::context_footprint(context.get());
    const auto notes = static_cast<double>(internals::n_cells(context.get()) * kCellBytes);
    const double outputs = output_bytes_ * std::max(std::min(n_outputs_, n_ctx), params_.n_seq_max);
    Need need{{"", static_cast<double>(footprint.host) + outputs + notes, available_}};
    for (const auto& [device, bytes] : footprint.devices) {
      size_t free = 0;
      size_t total = 0;
      ggml_backend_dev_memory(device, &free, &total);
      // Some back ends do not report it.
      if (total == 0) continue;
      need.push_back({std::string(" of ") + ggml_backend_dev_name(device), static_cast<double>(bytes),
                      static_cast<double>(free)});
    }
    return need;
  }

  llama_context_ptr made(uint32_t n_ctx, uint32_t n_seq_max) const {
    auto params = params_;
    params.n_ctx = n_ctx;
    params.n_seq_max = n_seq_max;
    const LogMute mute;
    llama_context_ptr context;
    try {
      guarded("", [&] { context.reset(llama_init_from_model(model_.get(), params)); });
    } catch (const Error&) {
      // The real attempt will report the reason.
    }
    return context;
  }

  Model::Handle model_;
  llama_context_params params_;
  double available_;
  uint32_t n_outputs_;   // outputs of one call
  double output_bytes_;  // bytes of an output
};

}  // namespace

void require_context_memory(const Model& model, const llama_context_params& params, uint64_t available) {
  auto smallest = static_cast<double>(available);
  for (ggml_backend_dev_t device : internals::devices(model.handle())) {
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    if (total > 0) smallest = std::min(smallest, static_cast<double>(free));
  }
  if (internals::context_bound(model.handle(), params) <= smallest) return;
  const Planner planner(model, params, available);
  if (!planner.works()) return;
  const auto need = planner.need(params.n_ctx);
  if (!need || fits(*need)) return;
  const auto largest = planner.largest(params.n_ctx, *need);
  const auto& place = tightest(*need);
  throw OutOfMemory("a context of n_ctx=" + std::to_string(params.n_ctx) + " needs " +
                    size_text(place.needed) + " of memory" + place.name + ", and " +
                    size_text(place.available) + " are available; " +
                    (largest > 0 ? "the largest n_ctx that fits is " + std::to_string(largest)
                                 : "a smaller n_ctx does not help, but a smaller n_seq_max, n_ubatch or "
                                   "n_outputs_max may"));
}

}  // namespace llamatap
