#include "engine/model/model.hpp"

#include <ggml-backend.h>
#include <llama.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdio>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/lifetime.hpp"
#include "engine/log.hpp"
#include "engine/memory_size.hpp"
#include "engine/model/gguf_file.hpp"
#include "engine/model/weight_conversion.hpp"
#include "engine/model/weights_memory_check.hpp"
#include "engine/private/draft_model.hpp"
#include "engine/private/model_weights.hpp"

namespace llamatap {

namespace {

llama_model_params engine_params(const ModelOptions& options) {
  auto params = llama_model_default_params();
  // An empty list keeps a model without GPU layers entirely off the GPU.
  static std::array<ggml_backend_dev_t, 1> no_devices{nullptr};
  if (options.n_gpu_layers == 0) params.devices = no_devices.data();
  params.n_gpu_layers = options.n_gpu_layers;
  params.load_mtp = options.load_mtp;
  params.vocab_only = options.vocab_only;
  return params;
}

/// Progress of loading, and the request to stop.
struct LoadState {
  std::atomic<float> fraction{0.0F};
  std::atomic<bool>* stop = nullptr;
  float converted = 0.0F;  // share of the weight conversion in `fraction`
};

llama_model_params load_params(const ModelOptions& options, LoadState& state) {
  auto params = engine_params(options);
  // Converted weights are in memory already: map them, unless they go to a GPU, or they would stay there too.
  const bool mapped = options.weights ? options.n_gpu_layers == 0 : options.use_mmap;
  params.load_mode = mapped ? LLAMA_LOAD_MODE_MMAP : LLAMA_LOAD_MODE_NONE;
  params.progress_callback_user_data = &state;
  params.progress_callback = [](float fraction, void* data) {
    auto* shared = static_cast<LoadState*>(data);
    shared->fraction = shared->converted + (1 - shared->converted) * fraction;
    return !*shared->stop && !Activity::ending();
  };
  return params;
}

/// A count with 3 digits: "512", "9.83M", "135M".
std::string rounded(uint64_t count) {
  auto value = static_cast<double>(count);
  size_t unit = 0;
  constexpr std::array<const char*, 5> kUnits{"", "K", "M", "B", "T"};
  for (; value >= 999.5 && unit + 1 < kUnits.size(); ++unit) value /= 1000;
  const int digits = unit == 0 || value >= 99.95 ? 0 : value >= 9.995 ? 1 : 2;
  std::array<char, 32> text{};
  std::snprintf(text.data(), text.size(), "%.*f%s", digits, value, kUnits.at(unit));
  return text.data();
}

}  // namespace

void Model::Free::operator()(llama_model* model) const {
  // A forked child cannot use the GPU: leave what it shares with the parent alone.
  if (process == static_cast<int32_t>(getpid())) llama_model_free(model);
}

Model::Model(Handle model, std::string path, const ModelOptions& options, Metadata metadata,
             bool blocks_alone)
    : model_(std::move(model)),
      path_(std::move(path)),
      options_(options),
      metadata_(std::move(metadata)),
      vocab_(llama_model_get_vocab(model_.get())),
      process_(model_.get_deleter().process),
      has_experts_(internals::has_experts(model_.get())),
      blocks_alone_(blocks_alone),
      on_gpu_(!internals::device_names(model_.get()).empty()) {}

ggml_backend_buffer_type* Model::host_buffers() const {
  const auto devices = internals::devices(model_.get());
  return devices.empty() ? nullptr : ggml_backend_dev_host_buffer_type(devices.front());
}

std::shared_ptr<Model> Model::load(const std::string& path, const ModelOptions& options,
                                   const std::function<bool(float)>& progress) {
  const Activity activity;
  const GgufFile file(path);
  file.check();
  auto metadata = file.metadata();
  if (options.memory_available > 0 && !options.vocab_only && !options.weights) {
    require_model_memory(file.parts(), options);
  }
  Handle model(nullptr, Free{static_cast<int32_t>(getpid())});
  LoadState state;
  std::string reason;
  run_polling(
      [&](std::atomic<bool>& stop) {
        state.stop = &stop;
        std::optional<ScratchFile> converted;
        if (options.weights) {
          convert_weights(file.parts(), *options.weights, options.memory_available, converted.emplace(),
                          {state.fraction, stop});
          state.converted = 0.5F;
        }
        const LogScope log;
        const AbortGuard guard;
        try {
          const std::string& source = converted ? converted->path() : path;
          model.reset(llama_model_load_from_file(source.c_str(), load_params(options, state)));
          reason = log.reason();
        } catch (const std::exception& error) {
          reason = error.what();
        }
        if (stop || Activity::ending()) throw Interrupted();
      },
      [&] { return progress && progress(state.fraction); });
  if (!model && says_no_memory(reason)) throw OutOfMemory("cannot load " + path + ": " + reason);
  if (!model) throw ModelLoadFailed("cannot load " + path + ": " + reason);
  if (const auto problem = internals::rotation_problem(model.get());
      !options.vocab_only && !problem.empty()) {
    throw ModelLoadFailed("cannot load " + path + ": " + problem);
  }
  if (progress) progress(1.0F);
  const bool blocks_alone = internals::draft_traits(model.get()).n_mtp > 0 &&
                            llama_model_n_layer(model.get()) > 0 && file.parts().size() == 1 &&
                            !file.has_tensor("blk.0.");
  // make_shared cannot call a private constructor.
  return std::shared_ptr<Model>(
      new Model(std::move(model), path, options, std::move(metadata), blocks_alone));
}

Model::Handle Model::without_weights(const std::string& path, const ModelOptions& options) {
  auto params = engine_params(options);
  params.no_alloc = true;
  params.load_mode = LLAMA_LOAD_MODE_NONE;
  const LogMute mute;
  Handle model(nullptr, Free{static_cast<int32_t>(getpid())});
  try {
    guarded("", [&] { model.reset(llama_model_load_from_file(path.c_str(), params)); });
  } catch (const Error&) {
    // The file may have been removed since it was loaded: return null.
  }
  return model;
}

std::string Model::arch() const {
  const auto found = metadata_.find("general.architecture");
  const auto* name = found == metadata_.end() ? nullptr : std::get_if<std::string>(&found->second);
  return name == nullptr ? std::string("unknown") : *name;
}

std::string Model::description() const {
  // The engine's own description knows few sizes, and confuses models of different width.
  const uint64_t n = n_params();
  return arch() + " " + (n == 0 ? "vocabulary" : rounded(n) + " " + file_type());
}

std::string Model::file_type() const {
  // The engine would guess it from the converted weights.
  if (options_.weights && metadata_.count("general.file_type") == 0) return "unknown";
  // The engine's names: "Q4_1", "Q4_K - Medium", "all F32", "(guessed) F16".
  std::string name = llama_ftype_name(llama_model_ftype(model_.get()));
  const std::string guessed = "(guessed) ";
  if (name.rfind(guessed, 0) == 0) name.erase(0, guessed.size());
  return name == "all F32" ? "F32" : name;
}

int32_t Model::n_layer() const { return llama_model_n_layer(model_.get()); }
int32_t Model::n_embd() const { return llama_model_n_embd(model_.get()); }
int32_t Model::n_embd_input() const { return llama_model_n_embd_inp(model_.get()); }
int32_t Model::n_ctx_train() const { return llama_model_n_ctx_train(model_.get()); }
uint64_t Model::n_params() const { return llama_model_n_params(model_.get()); }
uint64_t Model::size_bytes() const { return llama_model_size(model_.get()); }
bool Model::has_encoder() const { return llama_model_has_encoder(model_.get()); }
bool Model::has_decoder() const { return llama_model_has_decoder(model_.get()); }
int32_t Model::n_swa() const { return llama_model_n_swa(model_.get()); }
bool Model::is_recurrent() const { return llama_model_is_recurrent(model_.get()); }
bool Model::is_hybrid() const { return llama_model_is_hybrid(model_.get()); }

bool Model::batches_sequences() const {
  const std::string name = arch();
  return name != "plamo2" && name != "arwkv7" && name != "rwkv6qwen2" && name != "minimax-01";
}

bool Model::is_encoder() const { return (has_encoder() && !has_decoder()) || arch() == "llama-embed"; }

std::string Model::refusal() const {
  const std::string name = arch();
  if (blocks_alone_) return "the file holds only MTP blocks, without the model; they draft for another";
  if (name == "eagle3" || name == "dflash" || name == "gemma4-assistant") {
    return "this is no language model of its own; it drafts for another";
  }
  if (has_encoder() && has_decoder()) return "encoder-decoder models are not supported";
  // Its graph stores the values as a matrix, which the cache mistakes for heads.
  if (name == "plm") return "the engine aborts on every batch of more than one token";
  return {};
}

int32_t Model::n_positions() const {
  const auto type = llama_model_rope_type(model_.get());
  return type == LLAMA_ROPE_TYPE_MROPE || type == LLAMA_ROPE_TYPE_IMROPE ? 4 : 1;
}

int32_t Model::position_limit() const { return internals::position_limit(model_.get()); }

std::optional<std::string> Model::chat_template(const std::optional<std::string>& name) const {
  const char* text = llama_model_chat_template(model_.get(), name ? name->c_str() : nullptr);
  if (text == nullptr) return std::nullopt;
  return std::string(text);
}

std::vector<std::string> Model::device_names() const { return internals::device_names(model_.get()); }

std::vector<float> Model::token_embeddings(const std::vector<int32_t>& tokens) const {
  for (const int32_t token : tokens) vocab_.check(token);
  return internals::token_embedding_rows(model_.get(), tokens);
}

DraftTraits Model::draft_traits() const { return internals::draft_traits(model_.get()); }

std::string Model::shared_memory_mismatch(const Model& target) const {
  return internals::shared_memory_mismatch(model_.get(), target.handle());
}

}  // namespace llamatap
