#include "draft/block_drafter.hpp"

#include <algorithm>
#include <utility>

#include "draft/choice.hpp"
#include "draft/sequence_entries.hpp"
#include "engine/error.hpp"

namespace llamatap {

BlockDrafter::BlockDrafter(std::shared_ptr<SpeculativeContext> spec, const DraftSettings& settings)
    : spec_(std::move(spec)), settings_(settings), sequences_(spec_->context()->options().n_seq_max) {
  if (settings_.n_max < 1) throw InvalidInput("n_max must be at least 1");
  if (settings_.p_min > 0 && spec_->block().chained && !spec_->block().has_confidence) {
    throw InvalidInput("the DSpark file has no confidence head, so p_min must be 0");
  }
  const auto& block = spec_->block();
  settings_.n_max = std::min(settings_.n_max, block.size - block.first_slot);
}

void BlockDrafter::process(const Batch& batch, const float* states, const Poll& poll) {
  const auto held = hold();
  const auto use = spec_->hold();
  const auto entries = entries_by_sequence(batch);
  const auto width = static_cast<size_t>(spec_->n_features());
  for (const auto& [seq, rows] : entries) {
    spec_->check_sequence(seq);
    check_contiguous(batch, rows);
    const auto& sequence = sequences_[seq];
    if (sequence.lost) continue;
    sequence.progress.check_start(seq, batch.positions()[rows.front()], sequence.injected);
  }
  for (const auto& [seq, rows] : entries) {
    auto& sequence = sequences_[seq];
    if (sequence.lost) continue;
    const int32_t first = batch.positions()[rows.front()];
    sequence.features.resize(static_cast<size_t>(first - sequence.injected) * width);
    sequence.progress.next = first;
    if (first - sequence.injected > kMaxPending && !try_inject(seq, poll)) continue;
    sequence.progress.begin_batch(first, static_cast<int32_t>(rows.size()));
    bool finite = true;
    for (const int32_t row : rows) {
      const float* values = states + static_cast<size_t>(row) * width;
      sequence.features.insert(sequence.features.end(), values, values + width);
      finite = finite && all_finite(values, width);
    }
    if (!finite) lose(seq);
  }
}

void BlockDrafter::accept(int32_t seq, int32_t n) {
  const auto held = hold();
  spec_->check_sequence(seq);
  auto& sequence = sequences_[seq];
  if (sequence.lost) return;
  sequence.progress.accept(seq, n);
  const auto n_kept = static_cast<size_t>(sequence.progress.next - sequence.injected);
  sequence.features.resize(n_kept * static_cast<size_t>(spec_->n_features()));
}

void BlockDrafter::reset(int32_t seq) {
  const auto held = hold();
  const auto use = spec_->hold();
  spec_->check_sequence(seq);
  sequences_[seq] = Sequence();
  spec_->context()->memory()->remove(seq, -1, -1);
}

/// Stops drafting for a sequence until reset().
void BlockDrafter::lose(int32_t seq) {
  sequences_[seq] = Sequence();
  sequences_[seq].lost = true;
  spec_->context()->memory()->remove(seq, -1, -1);
}

/// Calls inject(); drops the sequence if the KV cache is full. Returns whether there was room.
bool BlockDrafter::try_inject(int32_t seq, const Poll& poll) {
  try {
    inject({seq}, poll);
  } catch (const ContextFull&) {
    lose(seq);
  }
  return !sequences_[seq].lost;
}

/// Decodes pending features into the draft's KV cache, replacing the last block.
void BlockDrafter::inject(const std::vector<int32_t>& seqs, const Poll& poll) {
  auto& context = *spec_->context();
  const auto width = static_cast<size_t>(spec_->n_features());
  Batch batch(spec_->n_features());
  std::vector<int32_t> counts(sequences_.size(), 0);
  const auto flush = [&] {
    if (batch.size() == 0) return;
    spec_->decode(batch, poll);
    for (const int32_t seq : seqs) {
      auto& sequence = sequences_[seq];
      const auto values = static_cast<std::ptrdiff_t>(static_cast<size_t>(counts[seq]) * width);
      sequence.features.erase(sequence.features.begin(), sequence.features.begin() + values);
      sequence.injected += counts[seq];
      sequence.progress.batch_start = std::max(sequence.progress.batch_start, sequence.injected);
      counts[seq] = 0;
    }
    batch.clear();
  };
  const auto waiting = [&](int32_t seq) { return sequences_[seq].progress.next - sequences_[seq].injected; };
  for (const int32_t seq : seqs) {
    context.memory()->remove(seq, sequences_[seq].injected, -1);
    while (waiting(seq) > counts[seq]) {
      const auto& sequence = sequences_[seq];
      const float* values = sequence.features.data() + static_cast<size_t>(counts[seq]) * width;
      batch.add_embedding(values, sequence.injected + counts[seq], {seq}, false);
      ++counts[seq];
      // Non-causal attention: a batch must fit one ubatch.
      if (batch.size() == static_cast<int32_t>(context.n_ubatch())) flush();
    }
    if (!context.options().kv_unified) flush();
  }
  flush();
}

void BlockDrafter::read_block(const DraftRequest& request, int32_t first_row, int32_t limit,
                              Draft& draft) const {
  const auto& context = *spec_->context();
  const auto& vocab = spec_->target()->model()->vocab();
  const auto& block = spec_->block();
  for (int32_t i = 0; i < limit; ++i) {
    const int32_t row = first_row + block.first_slot + i;
    const Choice choice = choose(context.output_logits(row), spec_->n_vocab(), vocab.size(), settings_,
                                 request, static_cast<size_t>(i));
    const float confidence =
        block.chained && block.has_confidence && settings_.p_min > 0 ? *context.next_state(row) : choice.best;
    if (choice.token < 0 || confidence < settings_.p_min) return;
    append(draft, choice);
    if (vocab.is_end_of_generation(choice.token)) return;
  }
}

/// Calls inject(). If the KV cache is full: removes all draft blocks and retries; drops sequences that still
/// do not fit.
void BlockDrafter::make_room(const std::vector<int32_t>& seqs, const Poll& poll) {
  try {
    inject(seqs, poll);
  } catch (const ContextFull&) {
    for (int32_t seq = 0; seq < static_cast<int32_t>(sequences_.size()); ++seq) {
      spec_->context()->memory()->remove(seq, sequences_[seq].injected, -1);
    }
    for (const int32_t seq : seqs) try_inject(seq, poll);
  }
}

std::vector<Draft> BlockDrafter::draft(const std::vector<DraftRequest>& requests, const Poll& poll) {
  const auto held = hold();
  const auto use = spec_->hold();
  auto& context = *spec_->context();
  const auto& block = spec_->block();
  std::vector<Draft> drafts(requests.size());
  std::vector<int32_t> seqs;
  std::vector<size_t> asked;
  int32_t longest = 0;
  std::vector<int32_t> limits(requests.size(), 0);
  check_requests(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    spec_->check_sequence(request.seq);
    context.model()->vocab().check(request.last_token);
    if (sequences_[request.seq].lost) continue;
    check_position(request, sequences_[request.seq].progress);
    const int32_t room = static_cast<int32_t>(context.n_ctx_seq()) - request.position - block.first_slot;
    limits[i] = std::min({settings_.n_max, request.n_max, room});
    if (limits[i] < 1 || limits[i] < settings_.n_min) continue;
    longest = std::max(longest, limits[i]);
    asked.push_back(i);
    seqs.push_back(request.seq);
  }
  if (asked.empty()) return drafts;
  // All blocks of a decode have the same length; some heads require it.
  const int32_t length = longest + block.first_slot;
  const bool unified = context.options().kv_unified;
  const auto together = unified ? std::max<size_t>(1, context.n_ubatch() / static_cast<uint32_t>(length)) : 1;
  make_room(seqs, poll);
  const auto is_lost = [&](size_t i) { return sequences_[requests[i].seq].lost; };
  asked.erase(std::remove_if(asked.begin(), asked.end(), is_lost), asked.end());
  try {
    for (size_t begin = 0; begin < asked.size(); begin += together) {
      const size_t end = std::min(asked.size(), begin + together);
      Batch batch;
      for (size_t k = begin; k < end; ++k) {
        const auto& request = requests[asked[k]];
        for (int32_t i = 0; i < length; ++i) {
          batch.add(i == 0 ? request.last_token : block.mask_token, request.position + i, {request.seq},
                    true);
        }
      }
      spec_->decode(batch, poll);
      for (size_t k = begin; k < end; ++k) {
        read_block(requests[asked[k]], static_cast<int32_t>(k - begin) * length, limits[asked[k]],
                   drafts[asked[k]]);
      }
    }
  } catch (const ContextFull&) {
    // Return the tokens drafted so far.
  }
  drop_short(drafts, settings_);
  return drafts;
}

}  // namespace llamatap
