#include "capture/recorder.hpp"

#include <ggml-backend.h>
#include <ggml.h>

#include <algorithm>
#include <cstring>

#include "capture/block_pool.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

bool is_finite(const float* values, size_t count) {
  // NaN and infinity have all exponent bits set; comparing bits vectorises.
  constexpr uint32_t kExponent = 0x7f800000;
  bool found = false;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bits = 0;
    std::memcpy(&bits, values + i, sizeof bits);
    found |= (bits & kExponent) == kExponent;
  }
  return !found;
}

/// The same for values of a dtype.
bool is_finite(const std::byte* values, size_t count, DType dtype) {
  if (dtype == DType::f32) return is_finite(reinterpret_cast<const float*>(values), count);
  const uint16_t exponent = dtype == DType::f16 ? 0x7c00 : 0x7f80;
  bool found = false;
  for (size_t i = 0; i < count; ++i) {
    uint16_t bits = 0;
    std::memcpy(&bits, values + i * sizeof bits, sizeof bits);
    found |= (bits & exponent) == exponent;
  }
  return !found;
}

}  // namespace

Recorder::Recorder(std::shared_ptr<const Model> model, std::shared_ptr<const LayerMap> map,
                   std::vector<int32_t> slots, DType dtype, std::vector<RowTarget> targets, TapWay way)
    : model_(std::move(model)),
      map_(std::move(map)),
      columns_(map_->sources().size()),
      row_bytes_(slots.size() * static_cast<size_t>(map_->n_embd()) * item_size(dtype)),
      dtype_(dtype),
      targets_(std::move(targets)),
      way_(way),
      next_(map_->sources().size(), 0) {
  if (slots.empty()) throw InvalidInput("no layers given; expected at least one");
  any_pooled_ =
      std::any_of(targets_.begin(), targets_.end(), [](const auto& one) { return one.pool != nullptr; });
  for (size_t column = 0; column < slots.size(); ++column) {
    const int32_t slot = slots[column];
    if (slot < 0 || slot > map_->norm_slot()) {
      throw InvalidInput("layer slot " + std::to_string(slot) + " is not in 0.." +
                         std::to_string(map_->norm_slot()));
    }
    if (slot == map_->norm_slot() && !map_->has_norm()) {
      throw Unsupported(
          "this model has no final norm, so there is no layer \"norm\"; its last block gives layer " +
          std::to_string(map_->n_layer()) + " (-1)");
    }
    columns_[slot].push_back(column);
    any_cropped_ = any_cropped_ || map_->sources()[slot].cropped;
    last_slot_ = std::max(last_slot_, slot);
    if (columns_[slot].size() == 1) groups_[map_->sources()[slot].cropped ? 1 : 0].slots.push_back(slot);
    if (way_ != TapWay::hooks) continue;
    if (!map_->sources()[slot].hooked) {
      throw InvalidInput("the engine has no hook for layer slot " + std::to_string(slot));
    }
    if (columns_[slot].size() == 1) hooked_layers_.push_back(slot);
  }
}

internals::CopyWishes Recorder::copies() {
  if (way_ != TapWay::copies) return {};
  return {
      copies_key(), copies_type(), [this](const Graph& graph) { return copied(graph); },
      [this](size_t group, size_t count, const internals::FetchRows& rows) { fetch(group, count, rows); }};
}

std::string Recorder::copies_key() const {
  std::string key = std::to_string(copies_type());
  for (const auto& group : groups_) {
    key += ',';
    for (const int32_t slot : group.slots) key += " " + std::to_string(slot);
  }
  return key;
}

ggml_type Recorder::copies_type() const {
  if (any_pooled_ || dtype_ == DType::f32) return GGML_TYPE_F32;
  return dtype_ == DType::f16 ? GGML_TYPE_F16 : GGML_TYPE_BF16;
}

std::vector<std::vector<const ggml_tensor*>> Recorder::copied(const Graph& graph) {
  const ResidualStreams streams(graph, map_->n_layer(), map_->n_embd(), &map_->sources());
  std::vector<std::vector<const ggml_tensor*>> found(groups_.size());
  for (size_t i = 0; i < groups_.size(); ++i) {
    for (const int32_t slot : groups_[i].slots) {
      const auto* stream = streams.by_slot()[slot];
      if (stream == nullptr) throw_missing(slot);
      check(slot, *stream);
      found[i].push_back(stream);
    }
  }
  return found;
}

void Recorder::fetch(size_t group, size_t count, const internals::FetchRows& fetch) {
  const Group& wanted = groups_[group];
  const int32_t slot = wanted.slots.front();
  if (next_[slot] + count > rows_of(slot).size()) throw_rows(slot);
  const size_t width = static_cast<size_t>(map_->n_embd()) * item_size(dtype_);
  // Whole rows of the result, in its order.
  bool whole = row_bytes_ == wanted.slots.size() * width && !any_pooled_;
  for (size_t i = 0; i < wanted.slots.size() && whole; ++i) whole = columns_[wanted.slots[i]].front() == i;
  const auto direct = whole ? runs(slot, count) : std::nullopt;
  if (direct) {
    for (const auto& run : *direct) fetch(run.row, run.first, run.count);
    fetched_.push_back({&wanted, next_[slot], count, nullptr});
  } else {
    const size_t item = any_pooled_ ? sizeof(float) : item_size(dtype_);
    auto block = block_for(*model_, count * wanted.slots.size() * static_cast<size_t>(map_->n_embd()) * item);
    fetch(block->data(), 0, count);
    fetched_.push_back({&wanted, next_[slot], count, std::move(block)});
  }
  for (const int32_t one : wanted.slots) advance(one, count);
}

void Recorder::deliver_fetched(const Fetched& fetched) {
  const auto& rows = rows_of(fetched.group->slots.front());
  const auto width = static_cast<size_t>(map_->n_embd());
  const size_t n_slots = fetched.group->slots.size();
  const DType dtype = any_pooled_ ? DType::f32 : dtype_;
  const size_t bytes = width * item_size(dtype);
  for (size_t i = 0; i < fetched.count; ++i) {
    const auto& target = targets_[rows[fetched.first + i]];
    for (size_t k = 0; k < n_slots; ++k) {
      const int32_t slot = fetched.group->slots[k];
      const std::byte* values =
          fetched.block == nullptr ? nullptr : fetched.block->data() + (i * n_slots + k) * bytes;
      if (values == nullptr && target.row != nullptr) values = target.row + columns_[slot].front() * bytes;
      if (values == nullptr) continue;
      if (slot == last_slot_) all_finite_ = all_finite_ && is_finite(values, width, dtype);
      if (fetched.block == nullptr) continue;
      for (const size_t column : columns_[slot]) {
        if (target.pool != nullptr) {
          target.pool->take(reinterpret_cast<const float*>(values), column * width, width);
        } else if (target.row != nullptr && any_pooled_) {
          write_values(reinterpret_cast<const float*>(values), width, dtype_,
                       target.row + column * width * item_size(dtype_));
        } else if (target.row != nullptr) {
          std::memcpy(target.row + column * bytes, values, bytes);
        }
      }
    }
  }
}

bool Recorder::needs_last_block(int32_t row) const { return any_cropped_ && targets_[row].wanted(); }

bool Recorder::stop_keeps_memory() const { return last_slot_ >= map_->n_layer(); }

void Recorder::begin(const Piece& piece) {
  piece_ = &piece;
  std::fill(next_.begin(), next_.end(), 0);
  fetched_.clear();
  wanted_.clear();
}

void Recorder::begin_graph(const Graph& graph) {
  wanted_.clear();
  const ResidualStreams streams(graph, map_->n_layer(), map_->n_embd(), &map_->sources());
  for (int32_t slot = 0; slot <= map_->norm_slot(); ++slot) {
    const ggml_tensor* stream = streams.by_slot()[slot];
    if (columns_[slot].empty() || stream == nullptr) continue;
    if (stream->op == GGML_OP_NONE) {
      // An input, not computed by a node: embeddings in place of tokens.
      copy(slot, *stream);
    } else {
      wanted_.emplace_back(stream, slot);
    }
  }
  std::sort(wanted_.begin(), wanted_.end());
}

std::pair<Recorder::Wanted, Recorder::Wanted> Recorder::slots_of(const ggml_tensor* node) const {
  const auto before = [](const auto& a, const auto& b) { return a.first < b.first; };
  return std::equal_range(wanted_.begin(), wanted_.end(), std::make_pair(node, 0), before);
}

bool Recorder::wants(const ggml_tensor* node) {
  const auto [first, last] = slots_of(node);
  return first != last;
}

bool Recorder::computed(const ggml_tensor* node) {
  const auto [first, last] = slots_of(node);
  bool ends = false;
  for (auto it = first; it != last; ++it) {
    copy(it->second, *node);
    ends = ends || it->second == last_slot_;
  }
  return !(piece_->may_stop && ends);
}

const std::vector<int32_t>& Recorder::rows_of(int32_t slot) const {
  return map_->sources()[slot].cropped ? piece_->output_rows : piece_->rows;
}

void Recorder::check(int32_t slot, const ggml_tensor& node) const {
  if (node.ne[0] == map_->n_embd() && node.type == GGML_TYPE_F32 && node.nb[0] == sizeof(float) &&
      node.ne[2] == 1 && node.ne[3] == 1) {
    return;
  }
  throw EngineFailed("layer slot " + std::to_string(slot) + " (" + node.name +
                     ") is not a float32 matrix of width " + std::to_string(map_->n_embd()) +
                     "; please report this");
}

void Recorder::throw_rows(int32_t slot) const {
  throw EngineFailed("layer slot " + std::to_string(slot) + " has more rows than the " +
                     std::to_string(rows_of(slot).size()) + " expected; please report this");
}

void Recorder::throw_missing(int32_t slot) {
  if (slot > 0)
    throw EngineFailed("layer slot " + std::to_string(slot) +
                       " is not in the graph of this batch; please report this");
  throw Unsupported(
      "layer 0 is not in the graph of this batch: with embeddings as input this model does not have it");
}

void Recorder::copy(int32_t slot, const ggml_tensor& node) {
  const auto count = static_cast<size_t>(node.ne[1]);
  const auto width = static_cast<size_t>(map_->n_embd());
  check(slot, node);
  if (next_[slot] + count > rows_of(slot).size()) throw_rows(slot);
  const ggml_backend_buffer_t buffer = node.view_src != nullptr ? node.view_src->buffer : node.buffer;
  const char* data = static_cast<const char*>(node.data);
  size_t stride = node.nb[1];
  if (buffer == nullptr || !ggml_backend_buffer_is_host(buffer)) {
    if (count == 0 || copy_runs(slot, node)) return;
    stride = width * sizeof(float);
    if (staging_ == nullptr || staging_->bytes() < count * stride)
      staging_ = block_for(*model_, count * stride);
    ggml_backend_tensor_get_2d(&node, staging_->data(), 0, stride, count, node.nb[1], stride);
    data = reinterpret_cast<const char*>(staging_->data());
  }
  // Checking the last slot is enough: NaN and infinity persist in the residual stream.
  for (size_t i = 0; slot == last_slot_ && i < count; ++i) {
    all_finite_ = all_finite_ && is_finite(reinterpret_cast<const float*>(data + i * stride), width);
  }
  deliver(slot, data, stride, count);
}

std::optional<std::vector<Recorder::Run>> Recorder::runs(int32_t slot, size_t count) const {
  // More calls cost more than staging.
  constexpr size_t kMostRuns = 64;
  const auto& rows = rows_of(slot);
  std::vector<Run> found;
  for (size_t i = 0; i < count; ++i) {
    const auto& target = targets_[rows[next_[slot] + i]];
    if (target.pool != nullptr) return std::nullopt;
    if (target.row == nullptr) continue;
    if (found.empty() || found.back().first + found.back().count != i ||
        found.back().row + found.back().count * row_bytes_ != target.row) {
      if (found.size() == kMostRuns) return std::nullopt;
      found.push_back({i, 0, target.row});
    }
    ++found.back().count;
  }
  return found;
}

bool Recorder::copy_runs(int32_t slot, const ggml_tensor& node) {
  const auto count = static_cast<size_t>(node.ne[1]);
  const size_t width = static_cast<size_t>(map_->n_embd()) * sizeof(float);
  if (dtype_ != DType::f32) return false;
  const auto found = runs(slot, count);
  if (!found) return false;
  for (const auto& run : *found) {
    for (const size_t column : columns_[slot]) {
      std::byte* data = run.row + column * width;
      ggml_backend_tensor_get_2d(&node, data, run.first * node.nb[1], width, run.count, node.nb[1],
                                 row_bytes_);
      for (size_t i = 0; slot == last_slot_ && i < run.count; ++i) {
        all_finite_ = all_finite_ &&
                      is_finite(reinterpret_cast<const float*>(data + i * row_bytes_), width / sizeof(float));
      }
    }
  }
  advance(slot, count);
  return true;
}

void Recorder::hooked(int32_t layer, const float* values) {
  deliver(layer, reinterpret_cast<const char*>(values), static_cast<size_t>(map_->n_embd()) * sizeof(float),
          piece_->rows.size());
}

void Recorder::deliver(int32_t slot, const char* data, size_t stride, size_t count) {
  const auto& rows = rows_of(slot);
  const auto width = static_cast<size_t>(map_->n_embd());
  for (size_t i = 0; i < count; ++i) {
    const auto& target = targets_[rows[next_[slot] + i]];
    if (!target.wanted()) continue;
    const auto* values = reinterpret_cast<const float*>(data + i * stride);
    for (const size_t column : columns_[slot]) {
      if (target.pool != nullptr) {
        target.pool->take(values, column * width, width);
      } else {
        write_values(values, width, dtype_, target.row + column * width * item_size(dtype_));
      }
    }
  }
  advance(slot, count);
}

void Recorder::end() {
  for (const auto& one : fetched_) deliver_fetched(one);
  fetched_.clear();
  for (size_t slot = 0; slot < columns_.size(); ++slot) {
    if (columns_[slot].empty()) continue;
    const auto expected = rows_of(static_cast<int32_t>(slot)).size();
    if (slot == 0 && next_[slot] == 0) throw_missing(0);
    if (next_[slot] != expected) {
      throw EngineFailed("layer slot " + std::to_string(slot) + " gave " + std::to_string(next_[slot]) +
                         " rows where " + std::to_string(expected) + " were expected; please report this");
    }
  }
}

}  // namespace llamatap
