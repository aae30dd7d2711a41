#pragma once

#include <cstdint>
#include <vector>

#include "engine/context/batch.hpp"

/// An entry of a batch under test; its token is 10 * seq + position.
struct Entry {
  int32_t position;
  int32_t seq = 0;
  bool output = false;
};

inline llamatap::Batch batch_of(const std::vector<Entry>& entries) {
  llamatap::Batch batch;
  for (const Entry& one : entries)
    batch.add(10 * one.seq + one.position, one.position, {one.seq}, one.output);
  return batch;
}

/// Consecutive tokens of sequence 0 from `position` on, without outputs.
inline llamatap::Batch text_of(const std::vector<int32_t>& tokens, int32_t position = 0) {
  llamatap::Batch batch;
  for (const int32_t token : tokens) batch.add(token, position++, {0}, false);
  return batch;
}
