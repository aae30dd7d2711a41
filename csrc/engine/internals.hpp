#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

struct ggml_backend_device;
struct ggml_tensor;
struct llama_batch;
struct llama_context;
struct llama_context_params;
struct llama_model;
class llm_graph_result;

/// Access to the engine beyond its public header, through its internal headers. An engine bump that breaks
/// something breaks it here.
namespace llamatap::internals {

/// The devices that hold layers; none when all are on the CPU.
std::vector<ggml_backend_device*> devices(const llama_model* model);
std::vector<std::string> device_names(const llama_model* model);

/// Throws Unsupported when the model has no plain token embedding matrix.
std::vector<float> token_embedding_rows(const llama_model* model, const std::vector<int32_t>& tokens);

/// The rows of the learned position embedding; what 32 bits hold, less one, without such.
int32_t position_limit(const llama_model* model);

bool has_experts(const llama_model* model);

/// Whether each cache of the memory has layers: of one without, moving positions ends the process.
bool can_shift(const llama_context* context);

/// The fault in how many values of a head RoPE rotates; empty when there is none. With one, the engine would
/// abort during a decode or never end it.
std::string rotation_problem(const llama_model* model);

/// In how many parts, each on one back end, the scheduler computes the current graph.
int32_t n_splits(const llama_context* context);

/// Carries out what memory operations have left to the next decode (moved positions, copied streams).
void apply_memory_updates(llama_context* context);

bool flash_attention(const llama_context* context);
bool causal_attention(const llama_context* context);

/// The ubatches in which the engine will compute the entries of `batch`, and their order in each: its own
/// splitter is asked, with the memory as it is now. No value when the batch would not fit.
std::optional<std::vector<std::vector<int32_t>>> ubatches(llama_context* context, const llama_batch& batch);

/// The graph of a ubatch, built but not computed; null when that fails. Valid until the next call for the
/// same context.
const llm_graph_result* reserve_graph(llama_context* context, uint32_t n_tokens, uint32_t n_outputs);

/// The engine's own copy of the input of a layer, made after each ubatch. Only where LayerSource::hooked says
/// that there is one: elsewhere the next decode aborts. Costs a new reservation of memory when it changes.
void hook_layer(llama_context* context, int32_t layer, bool on);

/// The rows that the hook of a layer copied in the last decode: [n_tokens, n_embd] in batch order, valid
/// until the next call.
const float* hooked_rows(llama_context* context, int32_t layer);

/// Sets the graph callback of a context that was made with one; null: none, and no stops between nodes.
void set_callback(llama_context* context, bool (*callback)(ggml_tensor*, bool, void*));

/// Bytes of buffers, by where they are.
struct Footprint {
  uint64_t host = 0;
  uint64_t mapped =
      0;  // of models: what is part of `host`, and need not be in memory when the file is mapped
  std::map<ggml_backend_device*, uint64_t> devices;
};

/// The weights of a model, also of one that was loaded without them (no_alloc).
Footprint weights_footprint(const llama_model* model);

/// The memory of sequences and the buffers that graphs are computed in, also where nothing is allocated
/// because the model is one without weights. Not the outputs.
Footprint context_footprint(const llama_context* context);

/// Bytes of the recurrent states of a context. Allocated even where the model is one without weights.
uint64_t recurrent_bytes(const llama_context* context);

/// Places for tokens in the caches of keys and values, of all sequences together.
uint64_t n_cells(const llama_context* context);

/// Upper bound, quick to compute, of the bytes of a context of this model, in all places together.
double context_bound(const llama_model* model, const llama_context_params& params);

/// Facts that a drafter's file states of itself and of its target.
struct DraftTraits {
  std::vector<int32_t> target_layers;  // H_k, of eagle3 and dflash
  int32_t n_features = 0;              // width of what is encoded
  int32_t n_mtp = 0;                   // MTP blocks
  int32_t n_embd_out = 0;              // width of the states of MTP blocks
  int32_t n_embedding = 0;             // width and rows of its token embedding; 0: it uses the target's
  int32_t n_embedding_rows = 0;
  int32_t n_head_rows = 0;      // rows of its output head; 0: it uses the target's
  bool has_selector = false;    // DFlash2
  bool has_markov = false;      // DSpark
  bool has_confidence = false;  // DSpark
  std::vector<int64_t> d2t;     // the target's token of each row of its head; empty: the same
};

DraftTraits draft_traits(const llama_model* model);
/// Why blocks that attend to the memory of a target cannot attend to that of this one; empty when they can.
/// The engine lets blocks with a sliding window read what the target's last but one layer remembers, and
/// others what the last one does.
std::string shared_memory_mismatch(const llama_model* draft, const llama_model* target);
int32_t feature_width(const llama_model* model);
int32_t draft_width(const llama_model* model);

/// Lets a context that drafts keep the states of its outputs, and see both ways within a block.
void give_next_states(llama_context* context, bool causal);

/// The state of an entry of the last batch that was an output.
const float* next_state(llama_context* context, int32_t index);

/// The states that the last llama_encode gave, [n_tokens, n_embd].
const float* encoded_states(llama_context* context);

/// The MTP block that the next decodes compute.
void select_mtp_block(llama_context* context, int32_t index);

/// The graph that the context is computing; to be called from the graph callback.
const llm_graph_result* computed_graph(llama_context* context);

}  // namespace llamatap::internals
