// Drafts of the engine's model-free types (ngram-*) along texts that are known already: how many rounds each
// text would take, without a model.
//
//     replay-drafts TYPE < texts
//
// Each line of the input is a request: the number of prompt tokens, then the tokens of prompt and answer. Each
// line of the output: rounds, drafted tokens, accepted tokens. The requests share the drafting state, as those
// of a slot of the engine's server do. The loop is that of llama-speculative-simple.

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>
#include <vector>

#include "common.h"
#include "log.h"
#include "speculative.h"

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  common_log_pause(common_log_main());
  common_params params;
  params.speculative.types = common_speculative_types_from_names({argv[1]});
  common_speculative* spec = common_speculative_init(params.speculative, 1);
  if (spec == nullptr) return 1;

  std::string line;
  while (std::getline(std::cin, line)) {
    std::istringstream fields(line);
    size_t n_prompt = 0;
    fields >> n_prompt;
    llama_tokens text;
    for (llama_token token = 0; fields >> token;) text.push_back(token);

    llama_tokens known(text.begin(), text.begin() + n_prompt - 1);
    known.reserve(text.size());
    common_speculative_begin(spec, 0, known);
    int n_rounds = 0;
    int n_drafted = 0;
    int n_accepted = 0;
    // `known` ends before the newest token.
    while (known.size() + 1 < text.size()) {
      const size_t n_left = text.size() - known.size() - 1;
      llama_tokens draft;
      common_speculative_get_draft_params(spec, 0) = {true,  static_cast<int32_t>(n_left) - 1,
                                                      static_cast<llama_pos>(known.size()),
                                                      text[known.size()], &known, &draft};
      // With n_max 0 the engine would not cut the draft.
      if (n_left > 1) common_speculative_draft(spec);
      size_t n = 0;
      while (n < draft.size() && draft[n] == text[known.size() + 1 + n]) ++n;
      common_speculative_accept(spec, 0, static_cast<uint16_t>(n));
      ++n_rounds;
      n_drafted += static_cast<int>(draft.size());
      n_accepted += static_cast<int>(n);
      for (size_t i = 0; i <= n; ++i) known.push_back(text[known.size()]);
    }
    std::printf("%d %d %d\n", n_rounds, n_drafted, n_accepted);
  }
  common_speculative_free(spec);
  return 0;
}
