#include "draft/token_drafter.hpp"

#include <algorithm>
#include <utility>

#include "draft/choice.hpp"
#include "draft/sequence_entries.hpp"
#include "engine/error.hpp"

namespace llamatap {

namespace {

// Above this, pairs are decoded before the draft: beside an output, some blocks compute logits for all rows.
constexpr size_t kMaxMixedPairs = 64;

}  // namespace

/// A draft that step() extends by a token at a time.
struct TokenDrafter::DraftInProgress {
  const DraftRequest* request;
  Draft* draft;
  int32_t limit;
  int32_t position;  // of its next pair
  int32_t row = -1;  // its last pair in the batch
  bool active = true;
  std::vector<float> states;  // with several MTP blocks: of all pairs of the draft so far
};

TokenDrafter::TokenDrafter(std::shared_ptr<SpeculativeContext> spec, const DraftSettings& settings)
    : spec_(std::move(spec)),
      settings_(settings),
      sequences_(spec_->context()->options().n_seq_max,
                 Sequence(PendingPairs(spec_->kind() == DraftKind::eagle3 ? 0 : 1,
                                       static_cast<size_t>(spec_->n_state())))) {
  if (settings_.n_max < 1) throw InvalidInput("n_max must be at least 1");
  if (spec_->n_heads() > 1) settings_.n_max = std::min(settings_.n_max, spec_->n_heads());
}

/// How many tokens can be drafted after a pair at `position`.
int32_t TokenDrafter::room_after(int32_t position) const {
  const auto& context = *spec_->context();
  const int32_t limit = context.model()->position_limit();
  if (spec_->shares_memory()) return limit - position;
  return std::min(limit, static_cast<int32_t>(context.n_ctx_seq())) - position;
}

void TokenDrafter::process(const Batch& batch, const float* states, const Poll& poll) {
  const auto held = hold();
  const auto use = spec_->hold();
  const auto entries = entries_by_sequence(batch);
  for (const auto& [seq, rows] : entries) {
    spec_->check_sequence(seq);
    check_contiguous(batch, rows);
    const auto& sequence = sequences_[seq];
    if (sequence.lost) continue;
    sequence.progress.check_start(seq, batch.positions()[rows.front()], sequence.pairs.earliest());
  }
  for (const int32_t token : batch.tokens()) spec_->target()->model()->vocab().check(token);
  const int32_t n_vocab = spec_->n_vocab();
  const auto width = static_cast<size_t>(spec_->n_features());
  for (const auto& [seq, rows] : entries) {
    auto& sequence = sequences_[seq];
    if (sequence.lost) continue;
    const auto unusable = [&](int32_t row) {
      // The draft's vocabulary lacks the token (less padding), or the target's state is not finite.
      return batch.tokens()[row] >= n_vocab || !all_finite(states + static_cast<size_t>(row) * width, width);
    };
    if (std::any_of(rows.begin(), rows.end(), unusable)) lose(seq);
    const int32_t first = batch.positions()[rows.front()];
    if (first == sequence.progress.next && sequence.pairs.n_complete() >= size_t{kMaxPending}) {
      try_flush({seq}, poll);
    }
    if (sequence.lost) continue;
    sequence.progress.begin_batch(first, static_cast<int32_t>(rows.size()));
    for (const int32_t row : rows) {
      TargetEntry taken{batch.positions()[row], batch.tokens()[row], {}, spec_->kind() != DraftKind::eagle3};
      if (width > 0) {
        const float* values = states + static_cast<size_t>(row) * width;
        taken.state.assign(values, values + width);
      }
      sequence.pairs.take(std::move(taken));
    }
  }
}

void TokenDrafter::accept(int32_t seq, int32_t n) {
  const auto held = hold();
  spec_->check_sequence(seq);
  auto& sequence = sequences_[seq];
  if (sequence.lost) return;
  sequence.progress.accept(seq, n);
  sequence.pairs.truncate(sequence.progress.next);
}

void TokenDrafter::reset(int32_t seq) {
  const auto held = hold();
  const auto use = spec_->hold();
  spec_->check_sequence(seq);
  sequences_[seq].restart();
  if (!spec_->shares_memory()) spec_->context()->memory()->remove(seq, -1, -1);
}

void TokenDrafter::encode(const std::vector<int32_t>& seqs, const Poll& poll) {
  std::vector<TargetEntry*> rows;
  for (const int32_t seq : seqs) {
    for (TargetEntry& row : sequences_[seq].pairs.entries()) {
      if (!row.encoded) rows.push_back(&row);
    }
  }
  if (rows.empty()) return;
  const auto n_state = static_cast<size_t>(spec_->n_state());
  std::vector<float> features;
  features.reserve(rows.size() * static_cast<size_t>(spec_->n_features()));
  for (const TargetEntry* row : rows) features.insert(features.end(), row->state.begin(), row->state.end());
  std::vector<float> states(rows.size() * n_state);
  spec_->encode(features.data(), static_cast<int32_t>(rows.size()), states.data(), poll);
  for (size_t i = 0; i < rows.size(); ++i) {
    rows[i]->state.assign(states.data() + i * n_state, states.data() + (i + 1) * n_state);
    rows[i]->encoded = true;
  }
}

Batch TokenDrafter::empty_batch() const {
  return spec_->n_state() > 0 ? Batch::of_pairs(spec_->n_state()) : Batch();
}

void TokenDrafter::add(Batch& batch, int32_t token, const float* state, int32_t position, int32_t seq,
                       bool output) const {
  if (spec_->n_state() > 0) {
    batch.add_pair(token, state, position, {seq}, output);
  } else {
    batch.add(token, position, {seq}, output);
  }
}

/// Adds the complete pairs of a sequence, without output flag.
void TokenDrafter::add_pairs(Batch& batch, int32_t seq) {
  auto& pairs = sequences_[seq].pairs;
  for (size_t i = 0; i < pairs.n_complete(); ++i) {
    add(batch, pairs.entries()[i + 1].token, pairs.entries()[i].state.data(), pairs.position(i), seq, false);
  }
}

/// Decodes complete pairs without drafting. Sequences longer than the KV cache allows are lost.
void TokenDrafter::flush(const std::vector<int32_t>& seqs, const Poll& poll) {
  std::vector<int32_t> ready;
  for (const int32_t seq : seqs) {
    auto& sequence = sequences_[seq];
    if (sequence.pairs.n_complete() == 0) continue;
    if (spec_->shares_memory()) {
      sequence.drop_complete();
    } else if (room_after(sequence.pairs.position(sequence.pairs.n_complete() - 1)) < 1) {
      lose(seq);
    } else {
      ready.push_back(seq);
    }
  }
  if (ready.empty()) return;
  encode(ready, poll);
  HeadSelection selection(*spec_);
  for (int32_t head = 0; head < spec_->n_heads(); ++head) {
    // Each head stores its pairs in the same cells: the engine takes the first free ones.
    ready.erase(std::remove_if(ready.begin(), ready.end(), [&](int32_t seq) { return !roll_back(seq); }),
                ready.end());
    if (ready.empty()) return;
    Batch batch = empty_batch();
    for (const int32_t seq : ready) add_pairs(batch, seq);
    selection.select(head);
    spec_->store(batch, poll);
  }
  for (const int32_t seq : ready) sequences_[seq].drop_complete();
}

void TokenDrafter::Sequence::drop_complete() {
  pairs.drop_complete();
  progress.batch_start = std::max(progress.batch_start, pairs.last().position);
}

void TokenDrafter::lose(int32_t seq) {
  sequences_[seq].restart();
  sequences_[seq].lost = true;
  if (!spec_->shares_memory()) spec_->context()->memory()->remove(seq, -1, -1);
}

/// Removes drafted tokens from the KV cache. The sequence is lost when sliding windows no longer hold the
/// tokens before, or when the cache was changed from outside. Returns whether it can go on.
bool TokenDrafter::roll_back(int32_t seq) {
  if (spec_->shares_memory()) return true;
  auto& sequence = sequences_[seq];
  auto& context = *spec_->context();
  const int32_t end = sequence.pairs.decoded_end();
  sequence.pairs.set_drafted(-1);
  try {
    context.memory()->remove(seq, end, -1);
    if (context.memory()->last(seq) != end - 1) lose(seq);
  } catch (const Unsupported&) {
    lose(seq);
  }
  return !sequence.lost;
}

/// Calls flush(); sequences without room in the KV cache are lost.
void TokenDrafter::try_flush(const std::vector<int32_t>& seqs, const Poll& poll) {
  try {
    flush(seqs, poll);
  } catch (const ContextFull&) {
    if (seqs.size() == 1) {
      lose(seqs.front());
    } else {
      for (const int32_t seq : seqs) try_flush({seq}, poll);
    }
  }
}

/// Appends the next token of a draft, from the logits of its last pair. Returns whether the draft continues.
bool TokenDrafter::take_choice(DraftInProgress& one) {
  const auto& context = *spec_->context();
  const auto& target_vocab = spec_->target()->model()->vocab();
  const Choice choice = choose(context.output_logits(one.row), spec_->n_vocab(), target_vocab.size(),
                               settings_, *one.request, one.draft->tokens.size());
  if (choice.token < 0 || choice.best < settings_.p_min) return false;
  append(*one.draft, choice);
  return static_cast<int32_t>(one.draft->tokens.size()) < one.limit &&
         !target_vocab.is_end_of_generation(choice.token);
}

/// Decodes the last token of all active drafts, in one batch.
void TokenDrafter::step(std::vector<DraftInProgress>& in_progress, const Poll& poll) {
  auto& context = *spec_->context();
  const bool chained = spec_->n_heads() > 1;
  const auto width = static_cast<size_t>(spec_->n_state());
  Batch batch = empty_batch();
  for (DraftInProgress& one : in_progress) {
    if (!one.active) continue;
    const int32_t seq = one.request->seq;
    const auto& tokens = one.draft->tokens;
    const float* state = width > 0 ? context.next_state(one.row) : nullptr;
    if (!chained) {
      add(batch, tokens.back(), state, one.position, seq, true);
      if (!spec_->shares_memory()) ++one.position;
    } else {
      // Each MTP block has its own KV cache of the draft, so it decodes all of it.
      one.states.insert(one.states.end(), state, state + width);
      for (size_t i = 0; i <= tokens.size(); ++i) {
        add(batch, i == 0 ? one.request->last_token : tokens[i - 1], one.states.data() + i * width,
            one.position + static_cast<int32_t>(i), seq, i == tokens.size());
      }
    }
    one.row = batch.size() - 1;
  }
  for (const DraftInProgress& one : in_progress) {
    if (chained && one.active) context.memory()->remove(one.request->seq, one.position, -1);
  }
  spec_->decode(batch, poll);
}

/// First decode of drafts: pending pairs, and each sequence's last token with the state before it. If the KV
/// cache is full: removes the drafts of other sequences and retries, then drops the longest sequences.
void TokenDrafter::start(std::vector<DraftInProgress>& in_progress, const Poll& poll) {
  const auto drop_lost = [&] {
    const auto is_lost = [&](const DraftInProgress& one) { return sequences_[one.request->seq].lost; };
    in_progress.erase(std::remove_if(in_progress.begin(), in_progress.end(), is_lost), in_progress.end());
  };
  for (bool full = false;; full = true) {
    for (const DraftInProgress& one : in_progress) roll_back(one.request->seq);
    drop_lost();
    if (in_progress.empty()) return;
    Batch batch = empty_batch();
    for (DraftInProgress& one : in_progress) {
      const auto& last = sequences_[one.request->seq].pairs.last();
      add_pairs(batch, one.request->seq);
      add(batch, one.request->last_token, last.state.data(), one.position, one.request->seq, true);
      if (spec_->n_heads() > 1) one.states = last.state;
      one.row = batch.size() - 1;
    }
    try {
      spec_->decode(batch, poll);
      return;
    } catch (const ContextFull&) {
      if (!full) {
        for (int32_t seq = 0; seq < static_cast<int32_t>(sequences_.size()); ++seq) {
          if (!sequences_[seq].pairs.empty()) roll_back(seq);
        }
      } else {
        const auto longest = std::max_element(
            in_progress.begin(), in_progress.end(),
            [](const DraftInProgress& a, const DraftInProgress& b) { return a.position < b.position; });
        lose(longest->request->seq);
      }
    }
  }
}

std::vector<Draft> TokenDrafter::draft(const std::vector<DraftRequest>& requests, const Poll& poll) {
  const auto held = hold();
  const auto use = spec_->hold();
  const bool chained = spec_->n_heads() > 1;
  const bool shared = spec_->shares_memory();
  std::vector<Draft> drafts(requests.size());
  std::vector<DraftInProgress> in_progress;
  std::vector<int32_t> seqs;
  size_t n_pairs = 0;
  check_requests(requests);
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    spec_->check_sequence(request.seq);
    spec_->target()->model()->vocab().check(request.last_token);
    if (request.last_token >= spec_->n_vocab()) lose(request.seq);
    auto& sequence = sequences_[request.seq];
    if (sequence.lost) continue;
    check_position(request, sequence.progress);
    const int32_t position = sequence.pairs.next_position();
    const int32_t limit = std::min({settings_.n_max, request.n_max, room_after(position)});
    if (limit < 1 || limit < settings_.n_min) continue;
    in_progress.push_back(DraftInProgress{&request, &drafts[i], limit, position, -1, true, {}});
    seqs.push_back(request.seq);
    n_pairs += sequence.pairs.n_complete();
  }
  if (in_progress.empty()) return drafts;
  encode(seqs, poll);
  if (chained || shared || n_pairs > kMaxMixedPairs) try_flush(seqs, poll);
  HeadSelection selection(*spec_);
  start(in_progress, poll);
  for (DraftInProgress& one : in_progress) {
    auto& sequence = sequences_[one.request->seq];
    sequence.drop_complete();
    if (chained || shared) continue;
    sequence.pairs.set_drafted(one.request->last_token);
    ++one.position;
  }
  try {
    for (int32_t head = 1;; ++head) {
      bool any = false;
      for (DraftInProgress& one : in_progress) {
        one.active = one.active && take_choice(one);
        any = any || one.active;
      }
      if (!any) break;
      selection.select(head);
      step(in_progress, poll);
    }
  } catch (const ContextFull&) {
    // Return the tokens drafted so far.
  }
  drop_short(drafts, settings_);
  return drafts;
}

}  // namespace llamatap
