#include "engine/model/weight_conversion.hpp"

#include <ggml-cpp.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <system_error>

#include "engine/abort.hpp"
#include "engine/error.hpp"
#include "engine/log.hpp"
#include "engine/memory_size.hpp"

namespace llamatap {

namespace {

constexpr size_t kSlab = size_t{1} << 22;  // values converted at once; a multiple of all block sizes

std::string reason_of(int error) { return std::error_code(error, std::generic_category()).message(); }

ggml_type weight_type(const std::string& name) {
  if (name == "f32") return GGML_TYPE_F32;
  if (name == "f16") return GGML_TYPE_F16;
  if (name == "bf16") return GGML_TYPE_BF16;
  throw InvalidInput("weights must be \"f32\", \"f16\" or \"bf16\", not \"" + name + "\"");
}

/// An input file: its header, and its tensors without data.
struct Part {
  explicit Part(const std::string& path) : path(path), stream(path, std::ios::binary) {
    ggml_context* made = nullptr;
    header.reset(gguf_init_from_file(path.c_str(), {/*no_alloc=*/true, &made}));
    tensors.reset(made);
    if (!header || !stream) throw ModelLoadFailed(path + " cannot be read");
  }

  void read(int64_t tensor, size_t offset, void* data, size_t size) {
    const size_t start = gguf_get_data_offset(header.get()) + gguf_get_tensor_offset(header.get(), tensor);
    stream.seekg(static_cast<std::streamoff>(start + offset));
    stream.read(static_cast<char*>(data), static_cast<std::streamsize>(size));
    if (!stream) throw ModelLoadFailed(path + " ends within its weights");
  }

  std::string path;
  std::ifstream stream;
  gguf_context_ptr header;
  ggml_context_ptr tensors;
};

/// The output type of weights of type `found`.
ggml_type type_of(ggml_type found, ggml_type wanted) {
  return found == GGML_TYPE_F32 || ggml_get_type_traits(found)->to_float == nullptr ? found : wanted;
}

gguf_context_ptr header_of(const std::vector<std::unique_ptr<Part>>& parts, ggml_type wanted) {
  gguf_context_ptr header(gguf_init_empty());
  gguf_set_kv(header.get(), parts.front()->header.get());
  for (const char* key : {"split.no", "split.count", "split.tensors.count", "general.alignment"}) {
    gguf_remove_key(header.get(), key);
  }
  for (const auto& part : parts) {
    for (int64_t i = 0; i < gguf_get_n_tensors(part->header.get()); ++i) {
      const char* name = gguf_get_tensor_name(part->header.get(), i);
      const ggml_tensor* tensor = ggml_get_tensor(part->tensors.get(), name);
      gguf_add_tensor(header.get(), tensor);
      gguf_set_tensor_type(header.get(), name, type_of(tensor->type, wanted));
    }
  }
  return header;
}

/// Converts the values of one tensor, slab by slab.
class Converter {
 public:
  Converter(ggml_type found, ggml_type wanted) : found_(found), wanted_(type_of(found, wanted)) {}

  /// Converts `count` values, from value number `done` on, read by `read(target, offset, size)`, into
  /// output(). Returns false when a value overflows the type.
  template <typename Read>
  bool convert(const Read& read, size_t done, size_t count) {
    const auto bytes = [&](ggml_type type, size_t n) {
      return n / static_cast<size_t>(ggml_blck_size(type)) * ggml_type_size(type);
    };
    input_.resize(bytes(found_, count));
    read(input_.data(), bytes(found_, done), input_.size());
    if (wanted_ == found_) {
      output_.swap(input_);
      return true;
    }
    values_.resize(count);
    const auto n = static_cast<int64_t>(count);
    ggml_get_type_traits(found_)->to_float(input_.data(), values_.data(), n);
    output_.resize(bytes(wanted_, count));
    if (wanted_ == GGML_TYPE_F16) {
      ggml_fp32_to_fp16_row(values_.data(), reinterpret_cast<ggml_fp16_t*>(output_.data()), n);
      // From 65520 on, rounding to float16 gives infinity.
      return std::none_of(values_.begin(), values_.end(),
                          [](float value) { return std::isfinite(value) && std::fabs(value) >= 65520.0F; });
    }
    if (wanted_ == GGML_TYPE_BF16) {
      ggml_fp32_to_bf16_row(values_.data(), reinterpret_cast<ggml_bf16_t*>(output_.data()), n);
    } else {
      std::copy_n(reinterpret_cast<const char*>(values_.data()), output_.size(), output_.data());
    }
    return true;
  }

  const std::vector<char>& output() const { return output_; }

 private:
  ggml_type found_;
  ggml_type wanted_;
  std::vector<char> input_;
  std::vector<float> values_;
  std::vector<char> output_;
};

}  // namespace

ScratchFile::ScratchFile() {
#ifdef __linux__
  descriptor_ = memfd_create("llamatap", MFD_CLOEXEC);
  const std::string folder = "/proc/self/fd/";
#else
  std::string name = (std::filesystem::temp_directory_path() / "llamatap-XXXXXX").string();
  descriptor_ = mkstemp(name.data());
  if (descriptor_ >= 0) unlink(name.c_str());
  const std::string folder = "/dev/fd/";
#endif
  if (descriptor_ < 0)
    throw EngineFailed("cannot create a file for the converted weights: " + reason_of(errno));
  path_ = folder + std::to_string(descriptor_);
}

ScratchFile::~ScratchFile() { close(descriptor_); }

void ScratchFile::write(const void* data, size_t size) {
  const char* next = static_cast<const char*>(data);
  while (size > 0) {
    const ssize_t written = ::write(descriptor_, next, size);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) throw EngineFailed("no room for the converted weights: " + reason_of(errno));
    next += written;
    size -= static_cast<size_t>(written);
  }
}

void convert_weights(const std::vector<std::string>& paths, const std::string& type, uint64_t available,
                     ScratchFile& target, const ConversionProgress& progress) {
  const ggml_type wanted = weight_type(type);
  const LogScope log;
  std::vector<std::unique_ptr<Part>> parts;
  std::vector<char> header;
  size_t alignment = 0;
  size_t total = 0;
  guarded("the weights cannot be converted", [&] {
    for (const auto& path : paths) parts.push_back(std::make_unique<Part>(path));
    const auto made = header_of(parts, wanted);
    header.resize(gguf_get_meta_size(made.get()));
    gguf_get_meta_data(made.get(), header.data());
    alignment = gguf_get_alignment(made.get());
    for (int64_t i = 0; i < gguf_get_n_tensors(made.get()); ++i) {
      total += gguf_get_tensor_size(made.get(), i);
    }
  });
  if (available > 0 && total > available) {
    throw OutOfMemory("the weights as " + type + " take " + size_text(total) + " of memory, and " +
                      size_text(available) + " are available; use a smaller type, or omit weights=");
  }
  target.write(header.data(), header.size());

  size_t finished = 0;
  for (const auto& part : parts) {
    for (int64_t i = 0; i < gguf_get_n_tensors(part->header.get()); ++i) {
      const char* name = gguf_get_tensor_name(part->header.get(), i);
      const ggml_tensor* tensor = ggml_get_tensor(part->tensors.get(), name);
      const auto n_values = static_cast<size_t>(ggml_nelements(tensor));
      const auto read = [&](void* data, size_t offset, size_t size) { part->read(i, offset, data, size); };
      Converter converter(tensor->type, wanted);
      size_t written = 0;
      for (size_t done = 0; done < n_values; done += kSlab) {
        if (progress.stop) throw Interrupted();
        if (!converter.convert(read, done, std::min(kSlab, n_values - done))) {
          throw InvalidInput(std::string(name) +
                             " has weights beyond float16, which ends at 65504; take "
                             "weights=\"bf16\" or \"f32\"");
        }
        target.write(converter.output().data(), converter.output().size());
        written += converter.output().size();
        progress.fraction = 0.5F * static_cast<float>(finished + written) / static_cast<float>(total);
      }
      finished += written;
      const std::vector<char> padding((alignment - written % alignment) % alignment, '\0');
      target.write(padding.data(), padding.size());
    }
  }
}

}  // namespace llamatap
