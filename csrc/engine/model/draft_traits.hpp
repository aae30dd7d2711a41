#pragma once

#include <cstdint>
#include <vector>

namespace llamatap {

/// Properties of a draft model, from its file.
struct DraftTraits {
  std::vector<int32_t> target_layers;  // k of H_k; eagle3 and dflash
  int32_t n_features = 0;              // width of the encoder's input
  int32_t n_mtp = 0;                   // MTP blocks
  int32_t n_embd_out = 0;              // width of the states of MTP blocks
  int32_t n_embedding = 0;             // width of the token embedding; 0: uses the target's
  int32_t n_embedding_rows = 0;
  int32_t n_head_rows = 0;      // rows of the output head; 0: uses the target's
  bool has_selector = false;    // DFlash2
  bool has_markov = false;      // DSpark
  bool has_confidence = false;  // DSpark
  std::vector<int64_t> d2t;     // by row of the head: the target's token; empty: equal ids
};

}  // namespace llamatap
