#include "draft/token_drafter.hpp"

#include <algorithm>
#include <utility>

#include "engine/error.hpp"

namespace llamatap {

namespace {

// Entries that wait for a draft before they are decoded without one.
constexpr size_t kMostWaiting = 512;
// Above this, pairs are decoded on their own: some blocks compute logits for all that is beside an output.
constexpr size_t kMostMixed = 64;

}  // namespace

/// A draft in the making.
struct TokenDrafter::Live {
  const DraftRequest* request;
  Draft* draft;
  Sequence* sequence;
  int32_t limit;
  int32_t position;  // of the pair that comes next
  int32_t row = -1;  // of its last pair in the batch
  bool going = true;
  std::vector<float> states;  // of chained heads: of every pair of the draft so far
};

TokenDrafter::TokenDrafter(std::shared_ptr<SpeculativeContext> spec, const DraftSettings& settings)
    : spec_(std::move(spec)),
      settings_(settings),
      offset_(spec_->kind() == DraftKind::eagle3 ? 0 : 1),
      sequences_(spec_->context()->options().n_seq_max) {
  if (settings_.n_max < 1) throw InvalidInput("n_max must be at least 1");
  if (spec_->n_heads() > 1) settings_.n_max = std::min(settings_.n_max, spec_->n_heads());
}

/// Throws InvalidInput unless entries at `first` and on go on from what the sequence has.
void TokenDrafter::check_start(const Sequence& sequence, int32_t seq, int32_t first) const {
  const auto& rows = sequence.rows;
  const int32_t next = rows.empty() ? 0 : rows.back().position + 1;
  // The caller may have taken entries back that are still waiting.
  const bool taken_back = !rows.empty() && first > rows.front().position && first < next;
  if (first == next || taken_back) return;
  throw InvalidInput("sequence " + std::to_string(seq) + " goes on at position " + std::to_string(next) +
                     ", not " + std::to_string(first) +
                     "; a drafter must process every batch of a sequence, from position 0, or be reset");
}

void TokenDrafter::take(Sequence& sequence, Row row, bool first) {
  auto& rows = sequence.rows;
  if (rows.empty() && offset_ == 1) {
    // Before the first token there is a state of zeros.
    const std::vector<float> zeros(static_cast<size_t>(spec_->n_state()), 0.0F);
    rows.push_back(Row{-1, -1, zeros, true});
  } else if (!rows.empty()) {
    rows.resize(static_cast<size_t>(row.position - rows.front().position));
    // The draft has decoded this pair.
    if (rows.size() == 1 && row.token == sequence.seed) rows.clear();
    sequence.seed = -1;
  }
  if (first) sequence.batch_start = rows.size();
  rows.push_back(std::move(row));
}

void TokenDrafter::process(const Batch& batch, const float* states, const Poll& poll) {
  const auto held = lock();
  const auto use = spec_->hold();
  const auto entries = entries_by_sequence(batch);
  for (const auto& [seq, rows] : entries) {
    spec_->check_sequence(seq);
    if (!sequences_[seq].lost) check_start(sequences_[seq], seq, batch.positions()[rows.front()]);
    check_contiguous(batch, rows);
  }
  for (const int32_t token : batch.tokens()) spec_->target()->model()->vocab().check(token);
  const int32_t n_vocab = spec_->n_vocab();
  const auto width = static_cast<size_t>(spec_->n_features());
  for (const auto& [seq, rows] : entries) {
    auto& sequence = sequences_[seq];
    // Of a vocabulary with other padding: the draft cannot go on.
    const auto unknown = [&](int32_t row) { return batch.tokens()[row] >= n_vocab; };
    if (std::any_of(rows.begin(), rows.end(), unknown)) lose(seq, sequence);
    const bool goes_on =
        !sequence.rows.empty() && batch.positions()[rows.front()] == sequence.rows.back().position + 1;
    if (goes_on && sequence.rows.size() > kMostWaiting) try_flush(seq, sequence, poll);
    if (sequence.lost) continue;
    bool first = true;
    for (const int32_t row : rows) {
      Row taken{batch.positions()[row], batch.tokens()[row], {}, spec_->kind() != DraftKind::eagle3};
      if (width > 0) {
        const float* values = states + static_cast<size_t>(row) * width;
        taken.state.assign(values, values + width);
      }
      take(sequence, std::move(taken), first);
      first = false;
    }
  }
}

void TokenDrafter::accept(int32_t seq, int32_t n) {
  const auto held = lock();
  spec_->check_sequence(seq);
  auto& sequence = sequences_[seq];
  if (sequence.lost) return;
  const size_t last = sequence.rows.size() - sequence.batch_start;
  if (sequence.rows.empty() || n < 0 || static_cast<size_t>(n) >= last) {
    throw_wrong_accept(seq, n, sequence.rows.empty() ? 0 : last);
  }
  sequence.rows.resize(sequence.batch_start + static_cast<size_t>(n) + 1);
}

void TokenDrafter::reset(int32_t seq) {
  const auto held = lock();
  const auto use = spec_->hold();
  spec_->check_sequence(seq);
  sequences_[seq] = Sequence();
  if (!spec_->shares_memory()) spec_->context()->memory_remove(seq, -1, -1);
}

void TokenDrafter::encode(const std::vector<Sequence*>& sequences) {
  std::vector<Row*> rows;
  for (Sequence* sequence : sequences) {
    for (Row& row : sequence->rows) {
      if (!row.encoded) rows.push_back(&row);
    }
  }
  if (rows.empty()) return;
  const auto n_state = static_cast<size_t>(spec_->n_state());
  std::vector<float> features;
  features.reserve(rows.size() * static_cast<size_t>(spec_->n_features()));
  for (const Row* row : rows) features.insert(features.end(), row->state.begin(), row->state.end());
  std::vector<float> states(rows.size() * n_state);
  spec_->encode(features.data(), static_cast<int32_t>(rows.size()), states.data());
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

/// Decodes the pairs of a sequence that are complete, without a draft.
void TokenDrafter::flush(int32_t seq, Sequence& sequence, const Poll& poll) {
  auto& rows = sequence.rows;
  if (rows.size() < 2) return;
  const size_t used = rows.size() - 1;
  const auto forget = [&] {
    rows.erase(rows.begin(), rows.end() - 1);
    sequence.batch_start -= std::min(sequence.batch_start, used);
    sequence.seed = -1;
  };
  if (spec_->shares_memory()) {
    forget();
    return;
  }
  encode({&sequence});
  auto& context = *spec_->context();
  Batch batch = empty_batch();
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    add(batch, rows[i + 1].token, rows[i].state.data(), rows[i].position + offset_, seq, false);
  }
  for (int32_t head = 0; head < spec_->n_heads(); ++head) {
    // The memory of each head is built over the same positions.
    if (!take_back(seq, sequence)) break;
    if (spec_->n_heads() > 1) context.select_head(head);
    spec_->store(batch, poll);
  }
  if (spec_->n_heads() > 1) context.select_head(0);
  if (!sequence.lost) forget();
}

void TokenDrafter::lose(int32_t seq, Sequence& sequence) {
  sequence = Sequence();
  sequence.lost = true;
  if (!spec_->shares_memory()) spec_->context()->memory_remove(seq, -1, -1);
}

/// Takes what was drafted out of the memory. Where windows have lost what comes before it, the sequence is
/// drafted for no more.
bool TokenDrafter::take_back(int32_t seq, Sequence& sequence) {
  if (spec_->shares_memory()) return true;
  try {
    spec_->context()->memory_remove(seq, decoded(sequence), -1);
  } catch (const Unsupported&) {
    lose(seq, sequence);
  }
  return !sequence.lost;
}

/// The same; a sequence for which the memory has no room is drafted for no more. Returns whether there was.
bool TokenDrafter::try_flush(int32_t seq, Sequence& sequence, const Poll& poll) {
  try {
    flush(seq, sequence, poll);
  } catch (const ContextFull&) {
    if (spec_->n_heads() > 1) spec_->context()->select_head(0);
    lose(seq, sequence);
  }
  return !sequence.lost;
}

/// Takes the next token of a draft from the logits of its last pair. Returns whether the draft goes on.
bool TokenDrafter::take_choice(Live& one) {
  const auto& context = *spec_->context();
  const auto& target_vocab = spec_->target()->model()->vocab();
  const Choice choice = choose(context.output_logits(one.row), spec_->n_vocab(), target_vocab.size(),
                               settings_, *one.request, one.draft->tokens.size());
  if (choice.best < settings_.p_min) return false;
  append(*one.draft, choice);
  return static_cast<int32_t>(one.draft->tokens.size()) < one.limit &&
         !target_vocab.is_end_of_generation(choice.token);
}

/// One decode for all drafts that go on, with the token that each drafted last.
void TokenDrafter::step(std::vector<Live>& live, const Poll& poll) {
  auto& context = *spec_->context();
  const bool chained = spec_->n_heads() > 1;
  const auto width = static_cast<size_t>(spec_->n_state());
  Batch batch = empty_batch();
  for (Live& one : live) {
    if (!one.going) continue;
    const int32_t seq = one.request->seq;
    const auto& tokens = one.draft->tokens;
    const float* state = width > 0 ? context.next_state(one.row) : nullptr;
    if (!chained) {
      add(batch, tokens.back(), state, one.position, seq, true);
      if (!spec_->shares_memory()) ++one.position;
    } else {
      // The next head has its own memory of the draft, so it sees all of it again.
      one.states.insert(one.states.end(), state, state + width);
      for (size_t i = 0; i <= tokens.size(); ++i) {
        add(batch, i == 0 ? one.request->last_token : tokens[i - 1], one.states.data() + i * width,
            one.position + static_cast<int32_t>(i), seq, i == tokens.size());
      }
    }
    one.row = batch.size() - 1;
  }
  for (const Live& one : live) {
    if (chained && one.going) context.memory_remove(one.request->seq, one.position, -1);
  }
  spec_->decode(batch, poll);
}

std::vector<Draft> TokenDrafter::draft(const std::vector<DraftRequest>& requests, const Poll& poll) {
  const auto held = lock();
  const auto use = spec_->hold();
  auto& context = *spec_->context();
  const bool chained = spec_->n_heads() > 1;
  std::vector<Draft> drafts(requests.size());
  std::vector<Live> live;
  std::vector<Sequence*> drafting;
  size_t n_pairs = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    spec_->check_sequence(request.seq);
    auto& sequence = sequences_[request.seq];
    if (std::find(drafting.begin(), drafting.end(), &sequence) != drafting.end()) {
      throw InvalidInput("sequence " + std::to_string(request.seq) + " is asked for twice");
    }
    spec_->target()->model()->vocab().check(request.last_token);
    if (request.last_token >= spec_->n_vocab()) lose(request.seq, sequence);
    if (sequence.lost) continue;
    const int32_t next = sequence.rows.empty() ? 0 : sequence.rows.back().position + 1;
    if (request.position != next || next == 0) {
      throw_wrong_position(request, next);
    }
    const int32_t position = sequence.rows.back().position + offset_;
    const int32_t room =
        spec_->shares_memory() ? request.n_max : static_cast<int32_t>(context.n_ctx_seq()) - position;
    const int32_t limit = std::min({settings_.n_max, request.n_max, room});
    if (limit < 1 || limit < settings_.n_min) continue;
    live.push_back(Live{&request, &drafts[i], &sequence, limit, position, -1, true, {}});
    drafting.push_back(&sequence);
    n_pairs += sequence.rows.size() - 1;
  }
  if (live.empty()) return drafts;
  encode(drafting);
  const bool shared = spec_->shares_memory();
  if (chained || shared || n_pairs > kMostMixed) {
    for (Live& one : live) one.going = try_flush(one.request->seq, *one.sequence, poll);
    live.erase(std::remove_if(live.begin(), live.end(), [](const Live& one) { return !one.going; }),
               live.end());
    if (live.empty()) return drafts;
  }
  for (Live& one : live) one.going = take_back(one.request->seq, *one.sequence);
  live.erase(std::remove_if(live.begin(), live.end(), [](const Live& one) { return !one.going; }),
             live.end());
  if (live.empty()) return drafts;
  Batch batch = empty_batch();
  for (Live& one : live) {
    const int32_t seq = one.request->seq;
    const auto& rows = one.sequence->rows;
    for (size_t i = 0; i + 1 < rows.size(); ++i) {
      add(batch, rows[i + 1].token, rows[i].state.data(), rows[i].position + offset_, seq, false);
    }
    add(batch, one.request->last_token, rows.back().state.data(), one.position, seq, true);
    if (chained) one.states = rows.back().state;
    one.row = batch.size() - 1;
  }
  try {
    spec_->decode(batch, poll);
    for (Live& one : live) {
      auto& rows = one.sequence->rows;
      rows.erase(rows.begin(), rows.end() - 1);
      one.sequence->batch_start = 0;
      const bool keeps = !chained && !shared;
      one.sequence->seed = keeps ? one.request->last_token : -1;
      if (keeps) ++one.position;
    }
    for (int32_t head = 1;; ++head) {
      bool any = false;
      for (Live& one : live) {
        one.going = one.going && take_choice(one);
        any = any || one.going;
      }
      if (!any) break;
      if (chained) context.select_head(head);
      step(live, poll);
    }
  } catch (const ContextFull&) {
    // What is there so far is a draft too.
  } catch (...) {
    if (chained) context.select_head(0);
    throw;
  }
  if (chained) context.select_head(0);
  drop_short(drafts, settings_);
  return drafts;
}

}  // namespace llamatap
