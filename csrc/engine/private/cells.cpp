// Reads the cells of the engine's caches from its internal headers.

#include "engine/private/cells.hpp"

#include <llama.h>

#include <algorithm>
#include <numeric>
#include <typeinfo>

#include "engine/private/caches.hpp"
#include "llama-context.h"

namespace {

using llamatap::internals::caches_of;
using llamatap::internals::recurrent_of;
using Slots = llama_kv_cache::slot_info;

// Calls a private method that zeroes cells in any layout. Names in an explicit instantiation are exempt from
// access checks.
void zero(llama_kv_cache& cache, uint32_t stream, const Slots& slots);

template <void (llama_kv_cache::*Member)(llama_seq_id, uint32_t, const Slots&)>
struct ReachZero {
  friend void zero(llama_kv_cache& cache, uint32_t stream, const Slots& slots) {
    // It also removes a sequence, any one: the cache is empty.
    (cache.*Member)(static_cast<llama_seq_id>(stream), stream, slots);
  }
};
template struct ReachZero<&llama_kv_cache::state_clear>;

std::vector<int32_t> positions(const llama_kv_cache& cache, int32_t seq) {
  std::vector<int32_t> found;
  for (const auto& [position, cell] : cache.get_cells(seq).seq_pos_get(seq)) found.push_back(position);
  return found;
}

std::vector<int32_t> positions_after(const llama_kv_cache& cache, int32_t other, int32_t seq,
                                     llamatap::PositionRange range, int32_t delta) {
  const auto& cells = cache.get_cells(other);
  // In separate streams no cell belongs to both sequences.
  std::vector<int32_t> found;
  for (const auto& [position, cell] : cells.seq_pos_get(other)) {
    const bool moves = cells.seq_has(cell, seq) && range.contains(position);
    found.push_back(moves ? position + delta : position);
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace

namespace llamatap {

Cells::Cells(const llama_context* context) : memory_(context->get_memory()) {
  // Read-only; the engine's getters are not const.
  auto* memory = const_cast<llama_memory_i*>(memory_);
  const auto caches = caches_of(memory);
  all_ = caches.all;
  windows_ = caches.windows;
  recurrent_ = recurrent_of(memory);
}

int32_t Cells::first(int32_t seq) const {
  if (all_ != nullptr) return all_->get_cells(seq).seq_pos_min(seq);
  // A recurrent state covers all tokens from the start.
  return std::min(last(seq), 0);
}

int32_t Cells::last(int32_t seq) const {
  return all_ != nullptr ? all_->get_cells(seq).seq_pos_max(seq) : memory_->seq_pos_max(seq);
}

bool Cells::any(int32_t seq, PositionRange range) const {
  if (all_ == nullptr) return range.begin < range.end && range.begin <= last(seq);
  const auto& of_seq = all_->get_cells(seq).seq_pos_get(seq);
  if (range.begin > INT32_MAX) return false;
  const auto found = of_seq.lower_bound({static_cast<llama_pos>(range.begin), 0});
  return found != of_seq.end() && found->first < range.end;
}

bool Cells::dropped(int32_t seq) const {
  return windows_ != nullptr &&
         windows_->get_cells(seq).seq_pos_get(seq).size() != all_->get_cells(seq).seq_pos_get(seq).size();
}

HeldPositions Cells::held(int32_t seq) const { return held_after(seq, seq, {0, 0}, 0); }

HeldPositions Cells::held_after(int32_t other, int32_t seq, PositionRange range, int32_t delta) const {
  HeldPositions found;
  if (all_ == nullptr) {
    const int32_t position = last(other);
    if (position >= 0) found.all = {range.contains(position) ? position + delta : position};
  } else {
    found.all = positions_after(*all_, other, seq, range, delta);
  }
  found.windows = windows_ == nullptr ? found.all : positions_after(*windows_, other, seq, range, delta);
  return found;
}

std::vector<int32_t> Cells::sharers(int32_t seq, PositionRange range, int32_t n_seq_max) const {
  std::vector<bool> found(static_cast<size_t>(n_seq_max), false);
  if (last(seq) >= 0) found[seq] = true;
  for (const auto* cache : {all_, windows_}) {
    if (cache == nullptr) continue;
    const auto& cells = cache->get_cells(seq);
    for (const auto& [position, cell] : cells.seq_pos_get(seq)) {
      if (!range.contains(position) || cells.seq_count(cell) == 1) continue;
      for (int32_t other = 0; other < n_seq_max; ++other) {
        if (cells.seq_has(cell, other)) found[other] = true;
      }
    }
  }
  if (recurrent_ != nullptr) {
    for (const auto& state : recurrent_->cells) {
      if (!state.has_seq_id(seq)) continue;
      for (const int32_t other : state.seq_id) found[other] = true;
    }
  }
  std::vector<int32_t> sequences;
  for (int32_t other = 0; other < n_seq_max; ++other) {
    if (found[other]) sequences.push_back(other);
  }
  return sequences;
}

int64_t Cells::used() const {
  if (all_ == nullptr) return 0;
  int64_t total = 0;
  for (uint32_t stream = 0; stream < all_->get_n_stream(); ++stream) {
    total += all_->get_cells(static_cast<llama_seq_id>(stream)).get_used();
  }
  return total;
}

uint32_t cells_in_use(llama_context* context) {
  const auto caches = caches_of(context->get_memory());
  uint32_t highest = 0;
  for (const auto* cache : {caches.all, caches.windows}) {
    for (uint32_t stream = 0; cache != nullptr && stream < cache->get_n_stream(); ++stream) {
      highest = std::max(highest, cache->get_cells(static_cast<llama_seq_id>(stream)).used_max_p1());
    }
  }
  return highest;
}

int64_t zero_cells(llama_context* context, uint32_t n) {
  auto* memory = context->get_memory();
  const auto& kind = typeid(*memory);
  // Other kinds also have indexer keys or compressed states.
  const bool known = kind == typeid(llama_kv_cache) || kind == typeid(llama_kv_cache_iswa) ||
                     kind == typeid(llama_memory_hybrid) || kind == typeid(llama_memory_hybrid_iswa);
  if (!known) return -1;
  memory->clear(/*data=*/false);
  if (auto* recurrent = recurrent_of(memory)) recurrent->clear(/*data=*/true);
  const auto caches = caches_of(memory);
  int64_t total = 0;
  for (auto* cache : {caches.all, caches.windows}) {
    for (uint32_t stream = 0; cache != nullptr && stream < cache->get_n_stream(); ++stream) {
      const uint32_t count = std::min(n, cache->get_size());
      Slots slots;
      slots.s0 = slots.s1 = stream;
      slots.resize(1);
      slots.strm[0] = stream;
      slots.idxs[0].resize(count);
      std::iota(slots.idxs[0].begin(), slots.idxs[0].end(), 0U);
      zero(*cache, stream, slots);
      total += count;
    }
  }
  return total;
}

}  // namespace llamatap
