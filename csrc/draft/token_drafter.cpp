#include "draft/token_drafter.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <utility>

#include "draft/distribution.hpp"
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

std::unique_lock<std::mutex> TokenDrafter::lock() {
  std::unique_lock<std::mutex> held(mutex_, std::try_to_lock);
  if (!held) throw Busy("another thread is using this drafter");
  return held;
}

void TokenDrafter::check_sequence(int32_t seq) const {
  if (seq < 0 || seq >= static_cast<int32_t>(sequences_.size())) {
    throw InvalidInput("sequence id " + std::to_string(seq) + " is not in 0.." +
                       std::to_string(sequences_.size() - 1) + " (n_seq_max of the speculative context)");
  }
}

void TokenDrafter::take(Sequence& sequence, int32_t seq, Row row, bool first) {
  auto& rows = sequence.rows;
  if (rows.empty()) {
    if (row.position != 0) {
      throw InvalidInput("sequence " + std::to_string(seq) + " starts at position " +
                         std::to_string(row.position) + "; a drafter must process all of it, from 0");
    }
    // Before the first token there is a state of zeros.
    const std::vector<float> zeros(static_cast<size_t>(spec_->n_state()), 0.0F);
    if (offset_ == 1) rows.push_back(Row{-1, -1, zeros, true});
  } else {
    if (first && row.position > rows.front().position && row.position <= rows.back().position) {
      // The caller took entries back.
      rows.resize(static_cast<size_t>(row.position - rows.front().position));
    }
    if (row.position != rows.back().position + 1) {
      throw InvalidInput("sequence " + std::to_string(seq) + " goes on at position " +
                         std::to_string(rows.back().position + 1) + ", not " + std::to_string(row.position) +
                         "; a drafter must process every batch, or be reset and process all of the sequence");
    }
    if (rows.size() == 1 && row.token == sequence.seed) {
      // The draft has decoded this pair.
      rows.clear();
    }
    sequence.seed = -1;
  }
  if (first) sequence.batch_start = rows.size();
  rows.push_back(std::move(row));
}

void TokenDrafter::process(const Batch& batch, const float* states, const Poll& poll) {
  const auto held = lock();
  if (!batch.has_tokens() || batch.has_embeddings()) {
    throw InvalidInput("the drafter needs token ids; this batch holds embeddings");
  }
  const int32_t n_vocab = spec_->context()->model()->vocab().size();
  std::map<int32_t, std::vector<int32_t>> entries;
  for (int32_t row = 0; row < batch.size(); ++row) {
    for (const int32_t seq : batch.sequences()[row]) {
      check_sequence(seq);
      entries[seq].push_back(row);
    }
    if (batch.tokens()[row] >= n_vocab) {
      throw InvalidInput("token " + std::to_string(batch.tokens()[row]) +
                         " is outside of the draft's vocabulary of " + std::to_string(n_vocab));
    }
  }
  const auto width = static_cast<size_t>(spec_->n_features());
  for (auto& [seq, rows] : entries) {
    auto& sequence = sequences_[seq];
    if (sequence.rows.size() > kMostWaiting) flush(seq, sequence, poll);
    std::stable_sort(rows.begin(), rows.end(),
                     [&](int32_t a, int32_t b) { return batch.positions()[a] < batch.positions()[b]; });
    bool first = true;
    for (const int32_t row : rows) {
      Row taken{batch.positions()[row], batch.tokens()[row], {}, spec_->kind() != DraftKind::eagle3};
      if (width > 0) {
        const float* values = states + static_cast<size_t>(row) * width;
        taken.state.assign(values, values + width);
      }
      take(sequence, seq, std::move(taken), first);
      first = false;
    }
  }
}

void TokenDrafter::accept(int32_t seq, int32_t n) {
  const auto held = lock();
  check_sequence(seq);
  auto& sequence = sequences_[seq];
  const size_t last = sequence.rows.size() - sequence.batch_start;
  if (sequence.rows.empty() || n < 0 || static_cast<size_t>(n) >= last) {
    throw InvalidInput(
        "sequence " + std::to_string(seq) + " had " + std::to_string(sequence.rows.empty() ? 0 : last) +
        " entries in the last batch; the first and " + std::to_string(n) + " more cannot stand");
  }
  sequence.rows.resize(sequence.batch_start + static_cast<size_t>(n) + 1);
}

void TokenDrafter::reset(int32_t seq) {
  const auto held = lock();
  check_sequence(seq);
  sequences_[seq] = Sequence();
  spec_->context()->memory_remove(seq, -1, -1);
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
  encode({&sequence});
  auto& context = *spec_->context();
  Batch batch = empty_batch();
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    add(batch, rows[i + 1].token, rows[i].state.data(), rows[i].position + offset_, seq, false);
  }
  for (int32_t head = 0; head < spec_->n_heads(); ++head) {
    // The memory of each head is built over the same positions.
    context.memory_remove(seq, decoded(sequence), -1);
    if (spec_->n_heads() > 1) context.select_head(head);
    context.decode(batch, nullptr, poll);
  }
  if (spec_->n_heads() > 1) context.select_head(0);
  const size_t used = rows.size() - 1;
  rows.erase(rows.begin(), rows.end() - 1);
  sequence.batch_start -= std::min(sequence.batch_start, used);
  sequence.seed = -1;
}

/// Takes the next token of a draft from a row of logits. Returns whether the draft goes on.
bool TokenDrafter::choose(Live& one, int32_t row) {
  const auto& context = *spec_->context();
  const float* logits = context.output_logits(row);
  const int32_t n_vocab = context.model()->vocab().size();
  const auto& target_vocab = spec_->target()->model()->vocab();
  auto [token, prob] = most_likely(logits, n_vocab);
  std::vector<float> distribution;
  if (settings_.temperature > 0) {
    distribution.resize(static_cast<size_t>(n_vocab));
    softmax(logits, n_vocab, settings_.temperature, distribution.data());
    const auto length = static_cast<uint32_t>(one.draft->tokens.size());
    std::seed_seq keys{settings_.seed, static_cast<uint32_t>(one.request->seq),
                       static_cast<uint32_t>(one.request->position) + length};
    std::mt19937 random(keys);
    token = draw(distribution.data(), n_vocab, std::uniform_real_distribution<double>()(random));
    prob = distribution[token];
  }
  if (prob < settings_.p_min || token >= target_vocab.size()) return false;
  one.draft->tokens.push_back(token);
  one.draft->probs.push_back(prob);
  one.draft->distributions.insert(one.draft->distributions.end(), distribution.begin(), distribution.end());
  return static_cast<int32_t>(one.draft->tokens.size()) < one.limit &&
         !target_vocab.is_end_of_generation(token);
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
      add(batch, tokens.back(), state, one.position++, seq, true);
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
  context.decode(batch, nullptr, poll);
}

std::vector<Draft> TokenDrafter::draft(const std::vector<DraftRequest>& requests, const Poll& poll) {
  const auto held = lock();
  auto& context = *spec_->context();
  const bool chained = spec_->n_heads() > 1;
  std::vector<Draft> drafts(requests.size());
  std::vector<Live> live;
  std::vector<Sequence*> drafting;
  size_t n_pairs = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const auto& request = requests[i];
    check_sequence(request.seq);
    auto& sequence = sequences_[request.seq];
    if (std::find(drafting.begin(), drafting.end(), &sequence) != drafting.end()) {
      throw InvalidInput("sequence " + std::to_string(request.seq) + " is asked for twice");
    }
    context.model()->vocab().check(request.last_token);
    const int32_t next = sequence.rows.empty() ? 0 : sequence.rows.back().position + 1;
    if (request.position != next || next == 0) {
      throw InvalidInput("sequence " + std::to_string(request.seq) + ": the last token must be at position " +
                         std::to_string(next) + ", after what was processed, not " +
                         std::to_string(request.position));
    }
    const int32_t position = sequence.rows.back().position + offset_;
    const int32_t room = static_cast<int32_t>(context.n_ctx_seq()) - position;
    const int32_t limit = std::min({settings_.n_max, request.n_max, room});
    if (limit < 1 || limit < settings_.n_min) continue;
    live.push_back(Live{&request, &drafts[i], &sequence, limit, position, -1, true, {}});
    drafting.push_back(&sequence);
    n_pairs += sequence.rows.size() - 1;
  }
  if (live.empty()) return drafts;
  encode(drafting);
  if (chained || n_pairs > kMostMixed) {
    for (const Live& one : live) flush(one.request->seq, *one.sequence, poll);
  }
  Batch batch = empty_batch();
  for (Live& one : live) {
    const int32_t seq = one.request->seq;
    const auto& rows = one.sequence->rows;
    context.memory_remove(seq, decoded(*one.sequence), -1);
    for (size_t i = 0; i + 1 < rows.size(); ++i) {
      add(batch, rows[i + 1].token, rows[i].state.data(), rows[i].position + offset_, seq, false);
    }
    add(batch, one.request->last_token, rows.back().state.data(), one.position, seq, true);
    if (chained) one.states = rows.back().state;
    one.row = batch.size() - 1;
  }
  try {
    context.decode(batch, nullptr, poll);
    for (Live& one : live) {
      auto& rows = one.sequence->rows;
      rows.erase(rows.begin(), rows.end() - 1);
      one.sequence->batch_start = 0;
      one.sequence->seed = chained ? -1 : one.request->last_token;
      if (!chained) ++one.position;
    }
    for (int32_t head = 1;; ++head) {
      bool any = false;
      for (Live& one : live) {
        one.going = one.going && choose(one, one.row);
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
  for (Draft& draft : drafts) {
    if (static_cast<int32_t>(draft.tokens.size()) < settings_.n_min) draft = Draft();
  }
  return drafts;
}

}  // namespace llamatap
