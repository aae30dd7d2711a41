#pragma once

#include <cstdint>
#include <vector>

namespace llamatap {

/// Properties that the file of a draft model states about itself and its target.
struct DraftTraits {
  std::vector<int32_t> target_layers;  // H_k, of eagle3 and dflash
  int32_t n_features = 0;              // width of the encoder's input
  int32_t n_mtp = 0;                   // MTP blocks
  int32_t n_embd_out = 0;              // width of the states of MTP blocks
  int32_t n_embedding = 0;             // width of its token embedding; 0: it uses the target's
  int32_t n_embedding_rows = 0;
  int32_t n_head_rows = 0;      // rows of its output head; 0: it uses the target's
  bool has_selector = false;    // DFlash2
  bool has_markov = false;      // DSpark
  bool has_confidence = false;  // DSpark
  std::vector<int64_t> d2t;     // by row of its head: the target's token; empty: the ids are equal
};

}  // namespace llamatap
