#include "engine/model/gguf_file.hpp"

#include <ggml.h>
#include <gguf.h>
#include <llama.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <string_view>
#include <system_error>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"

namespace llamatap {

namespace {

constexpr size_t kMaxArray = 1024;

template <typename From, typename To>
std::vector<To> copy_array(const gguf_context* file, int64_t key) {
  const auto* data = static_cast<const From*>(gguf_get_arr_data(file, key));
  return std::vector<To>(data, data + gguf_get_arr_n(file, key));
}

MetadataValue read_array(const gguf_context* file, int64_t key) {
  switch (gguf_get_arr_type(file, key)) {
    case GGUF_TYPE_UINT8: return copy_array<uint8_t, uint64_t>(file, key);
    case GGUF_TYPE_INT8: return copy_array<int8_t, int64_t>(file, key);
    case GGUF_TYPE_UINT16: return copy_array<uint16_t, uint64_t>(file, key);
    case GGUF_TYPE_INT16: return copy_array<int16_t, int64_t>(file, key);
    case GGUF_TYPE_UINT32: return copy_array<uint32_t, uint64_t>(file, key);
    case GGUF_TYPE_INT32: return copy_array<int32_t, int64_t>(file, key);
    case GGUF_TYPE_UINT64: return copy_array<uint64_t, uint64_t>(file, key);
    case GGUF_TYPE_INT64: return copy_array<int64_t, int64_t>(file, key);
    case GGUF_TYPE_FLOAT32: return copy_array<float, double>(file, key);
    case GGUF_TYPE_FLOAT64: return copy_array<double, double>(file, key);
    case GGUF_TYPE_BOOL: return copy_array<int8_t, bool>(file, key);
    case GGUF_TYPE_STRING: {
      std::vector<std::string> strings;
      strings.reserve(gguf_get_arr_n(file, key));
      for (size_t i = 0; i < gguf_get_arr_n(file, key); ++i) {
        strings.emplace_back(gguf_get_arr_str(file, key, i));
      }
      return strings;
    }
    default:
      throw ModelLoadFailed(std::string("metadata key ") + gguf_get_key(file, key) + " has an unknown type");
  }
}

MetadataValue read_value(const gguf_context* file, int64_t key) {
  switch (gguf_get_kv_type(file, key)) {
    case GGUF_TYPE_UINT8: return uint64_t{gguf_get_val_u8(file, key)};
    case GGUF_TYPE_INT8: return int64_t{gguf_get_val_i8(file, key)};
    case GGUF_TYPE_UINT16: return uint64_t{gguf_get_val_u16(file, key)};
    case GGUF_TYPE_INT16: return int64_t{gguf_get_val_i16(file, key)};
    case GGUF_TYPE_UINT32: return uint64_t{gguf_get_val_u32(file, key)};
    case GGUF_TYPE_INT32: return int64_t{gguf_get_val_i32(file, key)};
    case GGUF_TYPE_UINT64: return gguf_get_val_u64(file, key);
    case GGUF_TYPE_INT64: return gguf_get_val_i64(file, key);
    case GGUF_TYPE_FLOAT32: return double{gguf_get_val_f32(file, key)};
    case GGUF_TYPE_FLOAT64: return gguf_get_val_f64(file, key);
    case GGUF_TYPE_BOOL: return gguf_get_val_bool(file, key);
    case GGUF_TYPE_STRING: return std::string(gguf_get_val_str(file, key));
    case GGUF_TYPE_ARRAY: return read_array(file, key);
    default:
      throw ModelLoadFailed(std::string("metadata key ") + gguf_get_key(file, key) + " has an unknown type");
  }
}

/// Whether the engine can compute with weights of this type: it can convert them to float32.
bool is_weight_type(ggml_type type) {
  return type == GGML_TYPE_F32 || ggml_get_type_traits(type)->to_float != nullptr;
}

/// Whether the tensor is a table of ids: draft vocabulary to target vocabulary, or tokens to experts.
bool is_table(std::string_view name) {
  return name.find("d2t") != std::string_view::npos || name.find("tid2eid") != std::string_view::npos;
}

/// Whether the engine uses the tensor element by element. It must be float32, as converters write it: another
/// type aborts the process while computing.
bool is_elementwise(std::string_view name) {
  constexpr std::array kParts{
      "norm",         ".bias",        ".scale",      "_scale.weight",  "exp_probs_b", "token_types",
      "ssm_conv1d",   "ssm_a.",       "ssm_d.",      "shortconv.conv", "lerp",        "time_mix_first",
      "time_mix_ln",  "_decay.",      "time_mix_w0", "time_mix_a0",    "time_mix_v0", "time_mix_k_k",
      "time_mix_k_a", "time_mix_r_k", "res_score",   "z_l_init"};
  const std::string ended = std::string(name) + ".";
  return std::any_of(kParts.begin(), kParts.end(),
                     [&](const char* part) { return ended.find(part) != std::string::npos; });
}

}  // namespace

GgufFile::GgufFile(const std::string& path) : path_(path) {
  const LogScope log;
  guarded("not a readable GGUF file",
          [&] { file_.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, /*ctx=*/nullptr})); });
  if (!file_) {
    const std::string reason = log.reason();
    std::error_code error;
    const uint64_t size = std::filesystem::file_size(path, error);
    // The engine's words where the file ends too early.
    const bool ended = !error && reason.find("failed to read") != std::string::npos;
    throw ModelLoadFailed(path + " is not a readable GGUF file" +
                          (ended ? " (truncated? " + std::to_string(size) + " bytes)" : "") + ": " + reason);
  }
}

Metadata GgufFile::metadata() const {
  Metadata metadata;
  for (int64_t key = 0; key < gguf_get_n_kv(file_.get()); ++key) {
    const bool is_array = gguf_get_kv_type(file_.get(), key) == GGUF_TYPE_ARRAY;
    if (is_array && gguf_get_arr_n(file_.get(), key) > kMaxArray) continue;
    metadata.emplace(gguf_get_key(file_.get(), key), read_value(file_.get(), key));
  }
  return metadata;
}

void GgufFile::fail(const std::string& what) const { throw ModelLoadFailed(path_ + ": " + what); }

/// The index of a key; -1 when it is missing. Fails when its type differs.
int64_t GgufFile::find(const std::string& key, int type) const {
  const int64_t index = gguf_find_key(file_.get(), key.c_str());
  if (index < 0) return -1;
  const auto found = gguf_get_kv_type(file_.get(), index);
  const auto expected = static_cast<gguf_type>(type);
  if (found != expected) {
    fail(key + " must be of type " + gguf_type_name(expected) + ", not " + gguf_type_name(found));
  }
  return index;
}

std::string GgufFile::text(const std::string& key) const {
  const int64_t index = find(key, GGUF_TYPE_STRING);
  return index < 0 ? std::string() : gguf_get_val_str(file_.get(), index);
}

uint64_t GgufFile::count(const std::string& key, uint64_t otherwise) const {
  const int64_t index = find(key, GGUF_TYPE_UINT32);
  return index < 0 ? otherwise : gguf_get_val_u32(file_.get(), index);
}

void GgufFile::check() const {
  check_first();
  const std::string arch = text("general.architecture");
  if (arch.empty()) fail("general.architecture is missing: this file holds no model");
  const uint64_t n_blocks = count(arch + ".block_count", 0);
  check_values(arch);
  check_vocabulary();
  check_tensors(n_blocks);

  const auto paths = parts();
  for (size_t i = 1; i < paths.size(); ++i) GgufFile(paths[i]).check_tensors(n_blocks);
  if (arch == "eagle3") check_eagle3();
}

void GgufFile::check_first() const {
  const int64_t number = find("split.no", GGUF_TYPE_UINT16);
  const int64_t split = find("split.count", GGUF_TYPE_UINT16);
  if (number < 0 || split < 0 || gguf_get_val_u16(file_.get(), number) == 0) return;
  const int index = gguf_get_val_u16(file_.get(), number);
  const int n_files = gguf_get_val_u16(file_.get(), split);
  std::array<char, 4096> prefix{};
  std::array<char, 4096> first{};
  std::string advice = "give the first one";
  if (llama_split_prefix(prefix.data(), prefix.size(), path_.c_str(), index, n_files) > 0) {
    llama_split_path(first.data(), first.size(), prefix.data(), 0, n_files);
    advice += std::string(", ") + first.data();
  }
  fail("this is shard " + std::to_string(index + 1) + " of " + std::to_string(n_files) +
       " of a split model; " + advice);
}

void GgufFile::check_eagle3() const {
  constexpr std::array<std::string_view, 17> kComputed{"fc.weight",
                                                       "output_norm.weight",
                                                       "output.weight",
                                                       "token_embd.weight",
                                                       "d2t",
                                                       "rope_freqs.weight",
                                                       "blk.0.attn_norm.weight",
                                                       "blk.0.attn_norm_2.weight",
                                                       "blk.0.attn_q.weight",
                                                       "blk.0.attn_k.weight",
                                                       "blk.0.attn_v.weight",
                                                       "blk.0.attn_output.weight",
                                                       "blk.0.ffn_norm.weight",
                                                       "blk.0.ffn_gate.weight",
                                                       "blk.0.ffn_down.weight",
                                                       "blk.0.ffn_up.weight",
                                                       "enc.output_norm.weight"};
  const int64_t norm = find("eagle3.norm_before_fc", GGUF_TYPE_BOOL);
  const bool norms_features = norm >= 0 && gguf_get_val_bool(file_.get(), norm);
  std::string others;
  const auto add = [&](const std::string& name) { others += (others.empty() ? "" : ", ") + name; };

  for (int64_t key = 0; key < gguf_get_n_kv(file_.get()); ++key) {
    const std::string name = gguf_get_key(file_.get(), key);
    const bool is_off =
        gguf_get_kv_type(file_.get(), key) == GGUF_TYPE_BOOL && !gguf_get_val_bool(file_.get(), key);
    if (name.rfind("eagle3.", 0) != 0 || name.find("norm") == std::string::npos || is_off) continue;
    if (name == "eagle3.norm_before_fc" || name == "eagle3.norm_before_residual") continue;
    if (name.find("_epsilon") == std::string::npos) add(name);
  }
  for (const auto& path : parts()) {
    const GgufFile part(path);
    for (int64_t i = 0; i < gguf_get_n_tensors(part.file_.get()); ++i) {
      const std::string name = gguf_get_tensor_name(part.file_.get(), i);
      const bool computed = std::find(kComputed.begin(), kComputed.end(), name) != kComputed.end();
      if (!computed || (name == "enc.output_norm.weight" && !norms_features)) add(name);
    }
  }
  if (others.empty()) return;
  fail("the engine's EAGLE-3 graph does not compute with " + others +
       " (of EAGLE-3.1, or of another variant): it would ignore them");
}

std::vector<std::string> GgufFile::parts() const {
  std::vector<std::string> paths{path_};
  const int64_t split = find("split.count", GGUF_TYPE_UINT16);
  const int n_files = split < 0 ? 1 : gguf_get_val_u16(file_.get(), split);
  std::array<char, 4096> prefix{};
  std::array<char, 4096> other{};
  if (n_files <= 1 || llama_split_prefix(prefix.data(), prefix.size(), path_.c_str(), 0, n_files) <= 0) {
    return paths;
  }
  for (int i = 1; i < n_files; ++i) {
    llama_split_path(other.data(), other.size(), prefix.data(), i, n_files);
    paths.emplace_back(other.data());
  }
  return paths;
}

void GgufFile::check_tensors(uint64_t n_blocks) const {
  std::error_code error;
  const uint64_t size = std::filesystem::file_size(path_, error);
  if (error) fail("its size cannot be read: " + error.message());
  const uint64_t start = gguf_get_data_offset(file_.get());
  for (int64_t i = 0; i < gguf_get_n_tensors(file_.get()); ++i) {
    const std::string name = gguf_get_tensor_name(file_.get(), i);
    const ggml_type type = gguf_get_tensor_type(file_.get(), i);
    // The engine accepted the header: offsets are consecutive and their sum does not overflow.
    const uint64_t end =
        start + gguf_get_tensor_offset(file_.get(), i) + gguf_get_tensor_size(file_.get(), i);
    if (end > size) {
      fail("the weights of " + name + " end at byte " + std::to_string(end) + ", but the file has " +
           std::to_string(size) + " bytes: it is not complete (truncated?)");
    }
    if (gguf_get_tensor_size(file_.get(), i) == 0) fail(name + " has no elements");
    if (!is_weight_type(type) && !is_table(name)) {
      fail(name + " is of type " + ggml_type_name(type) + ", which is not a type of weights");
    }
    if (type != GGML_TYPE_F32 && is_elementwise(name)) {
      fail(name + " is of type " + ggml_type_name(type) + "; tensors used element by element must be f32");
    }
    constexpr std::string_view kBlock = "blk.";
    uint64_t block = 0;
    if (name.compare(0, kBlock.size(), kBlock) != 0) continue;
    const auto parsed = std::from_chars(name.data() + kBlock.size(), name.data() + name.size(), block);
    if (parsed.ec == std::errc() && block >= n_blocks) {
      fail(name + " is beyond the " + std::to_string(n_blocks) + " blocks of the model (block_count)");
    }
  }
}

void GgufFile::check_values(const std::string& arch) const {
  const auto check_number = [&](int64_t key, double value) {
    const std::string name = gguf_get_key(file_.get(), key);
    // An infinite bound means no bound.
    const bool bound = name.find("_bound") != std::string::npos;
    if (std::isnan(value) || (std::isinf(value) && !bound)) fail(name + " is not a finite number");
    if (value < 0 && name.find("_epsilon") != std::string::npos) fail(name + " must not be negative");
  };
  for (int64_t key = 0; key < gguf_get_n_kv(file_.get()); ++key) {
    if (std::string_view(gguf_get_key(file_.get(), key)).substr(0, arch.size() + 1) != arch + ".") continue;
    const auto type = gguf_get_kv_type(file_.get(), key);
    if (type == GGUF_TYPE_FLOAT32) check_number(key, double{gguf_get_val_f32(file_.get(), key)});
    if (type != GGUF_TYPE_ARRAY || gguf_get_arr_type(file_.get(), key) != GGUF_TYPE_FLOAT32) continue;
    const auto* values = static_cast<const float*>(gguf_get_arr_data(file_.get(), key));
    for (size_t i = 0; i < gguf_get_arr_n(file_.get(), key); ++i) check_number(key, double{values[i]});
  }
}

void GgufFile::check_vocabulary() const {
  const std::string kind = text("tokenizer.ggml.model");
  const int64_t tokens = find("tokenizer.ggml.tokens", GGUF_TYPE_ARRAY);
  const bool none = tokens < 0 || gguf_get_arr_n(file_.get(), tokens) == 0;
  if (!kind.empty() && kind != "none" && none) {
    fail("there is a tokenizer (" + kind + ") but tokenizer.ggml.tokens is missing or empty");
  }
}

bool GgufFile::has_tensor(const std::string& prefix) const {
  for (int64_t i = 0; i < gguf_get_n_tensors(file_.get()); ++i) {
    if (std::string_view(gguf_get_tensor_name(file_.get(), i)).substr(0, prefix.size()) == prefix)
      return true;
  }
  return false;
}

}  // namespace llamatap
