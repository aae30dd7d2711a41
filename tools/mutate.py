"""Break the code on purpose, one place at a time, and show that a test fails: tests/mutations.md.

    python tools/mutate.py [--only NAME]

Works on the checkout it lies in, which must be clean, with its own environment (.venv) and persistent build
folder; puts every file back. A mutation that no longer applies, or that its test survives, is an error.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "tests" / "mutations.md"
PYTHON = ROOT / ".venv" / "bin" / "python"

HEAD = """# Mutations

Made by `python tools/mutate.py`: each line is one place of the code, broken on purpose, and the first test
that failed for it.

| what is broken | where | the test that fails |
| --- | --- | --- |
"""


@dataclass
class Mutation:
    what: str
    path: str
    old: str
    new: str
    tests: str  # what pytest is given


ORACLE = "tests/python/test_oracle.py"
DRAFTERS = "tests/python/test_drafters.py -k every_draft"
MUTATIONS = [
    Mutation(
        "every layer is the next one",
        "csrc/capture/recorder.cpp",
        "const ggml_tensor* stream = streams.by_slot()[slot];",
        "const ggml_tensor* stream = streams.by_slot()[std::min(slot + 1, map_->n_layer())];",
        ORACLE,
    ),
    Mutation(
        "H_n is post-norm",
        "csrc/capture/recorder.cpp",
        "const ggml_tensor* stream = streams.by_slot()[slot];",
        "const ggml_tensor* stream = streams.by_slot()[slot == map_->n_layer() ? slot + 1 : slot];",
        ORACLE,
    ),
    Mutation(
        "norm(H_n) is pre-norm",
        "csrc/capture/recorder.cpp",
        "const ggml_tensor* stream = streams.by_slot()[slot];",
        "const ggml_tensor* stream = streams.by_slot()[std::min(slot, map_->n_layer())];",
        ORACLE,
    ),
    Mutation(
        "rows in ubatch order",
        "csrc/engine/decode.cpp",
        "if (!ubatches.empty() && hooks.empty()) {",
        "if (false) {",
        "tests/python/test_tap.py tests/python/test_extract.py " + ORACLE,
    ),
    Mutation(
        "rows of hooked layers in ubatch order",
        "csrc/engine/decode.cpp",
        "if (!ubatches.empty() && hooks.empty()) {",
        "if (!ubatches.empty()) {",
        "tests/python/test_architectures.py -k nemotron_h",
    ),
    Mutation(
        "the last block is cropped to the outputs",
        "csrc/capture/recorder.cpp",
        "return any_cropped_ && targets_[row].wanted();",
        "return false;",
        ORACLE,
    ),
    Mutation(
        "every ubatch writes over the one before",
        "csrc/capture/recorder.cpp",
        "next_[slot] += count;",
        "next_[slot] = count;",
        "tests/python/test_extract.py",
    ),
    Mutation(
        "the end comes a layer early",
        "csrc/capture/recorder.cpp",
        "ends = ends || it->second == last_slot_;",
        "ends = true;",
        ORACLE,
    ),
    Mutation(
        "a mean over one row too many",
        "csrc/capture/recorder.cpp",
        "kind_ == Pooling::mean ? static_cast<double>(rows) : 1.0",
        "kind_ == Pooling::mean ? static_cast<double>(rows + 1) : 1.0",
        "tests/python/test_extract.py",
    ),
    Mutation(
        "bfloat16 holds the bits of float16",
        "csrc/capture/block.cpp",
        "ggml_fp32_to_bf16_row(values, reinterpret_cast<ggml_bf16_t*>(target), n);",
        "ggml_fp32_to_fp16_row(values, reinterpret_cast<ggml_fp16_t*>(target), n);",
        "tests/python/test_extract.py tests/python/test_tap.py",
    ),
    Mutation(
        "one recurrent token too many is taken back",
        "csrc/engine/decode.cpp",
        "std::min(rows[seq] - 1, static_cast<int32_t>(options_.n_rs_seq))",
        "std::min(rows[seq], static_cast<int32_t>(options_.n_rs_seq))",
        "tests/python/test_memory.py",
    ),
    Mutation(
        "the callback stays for other graphs",
        "csrc/engine/decode.cpp",
        "internals::set_callback(context_.get(), nullptr);",
        "",
        "tests/python/test_context.py",
    ),
    Mutation(
        "a cleared memory keeps its data",
        "csrc/engine/memory.cpp",
        "clear_memory(/*data=*/true)",
        "clear_memory(/*data=*/false)",
        "tests/python/test_edges.py -k cleared",
    ),
    Mutation(
        "converted files are aligned as the file says",
        "csrc/engine/conversion.cpp",
        ', "general.alignment"}',
        "}",
        "tests/python/test_weights.py",
    ),
    Mutation(
        "a text that brings its BOS gets another",
        "python/llamatap/model.py",
        "tokens = tokens[1:].copy()",
        "pass",
        "tests/python/test_model.py",
    ),
    Mutation(
        "infinity is taken for a number",
        "python/llamatap/states.py",
        "np.isfinite(self.array[..., column, :])",
        "~np.isnan(self.array[..., column, :])",
        "tests/python/test_states.py",
    ),
    Mutation(
        "positions may meet",
        "csrc/engine/memory.cpp",
        "if (after.overlaps(target)) {",
        "if (false) {",
        "tests/python/test_context.py",
    ),
    Mutation(
        "assertions end the process",
        "csrc/engine/abort.cpp",
        "if (throws) throw EngineAborted(message);",
        "",
        "tests/python/test_probe.py -k numbers",
    ),
    Mutation(
        "files are not checked",
        "csrc/engine/model.cpp",
        "  file.check();\n",
        "",
        "tests/python/test_probe.py",
    ),
    Mutation(
        "a draft sees the states of the row before",
        "csrc/draft/token_drafter.cpp",
        "states + static_cast<size_t>(row) * width;",
        "states + static_cast<size_t>(std::max(row - 1, 0)) * width;",
        DRAFTERS,
    ),
    Mutation(
        "a draft is a position late",
        "csrc/draft/token_drafter.cpp",
        "const int32_t position = sequence.rows.back().position + offset_;",
        "const int32_t position = sequence.rows.back().position + offset_ + 1;",
        DRAFTERS,
    ),
    Mutation(
        "the first state is not of zeros",
        "csrc/draft/token_drafter.cpp",
        "static_cast<size_t>(spec_->n_state()), 0.0F);",
        "static_cast<size_t>(spec_->n_state()), 1.0F);",
        DRAFTERS,
    ),
    Mutation(
        "what was drafted is taken for what stands",
        "csrc/draft/token_drafter.cpp",
        "if (rows.size() == 1 && row.token ==",
        "if (rows.size() == 1 || row.token ==",
        "tests/python/test_drafters.py -k may_do",
    ),
    Mutation(
        "states that were taken back stay",
        "csrc/draft/token_drafter.cpp",
        "sequence.rows.resize(",
        "sequence.rows.reserve(",
        DRAFTERS,
    ),
    Mutation(
        "MTP blocks take the state before the norm",
        "csrc/draft/speculative_context.cpp",
        " ? n : n + 1};",
        " ? n : n};",
        "tests/python/test_mtp_of_qwen35.py",
    ),
    Mutation(
        "a block is a position late",
        "csrc/draft/block_drafter.cpp",
        "request.position + i, {request.seq}",
        "request.position + i + 1, {request.seq}",
        "tests/python/test_block_drafters.py -k formulas",
    ),
    Mutation(
        "one token more of a draft stands",
        "csrc/draft/verify.cpp",
        "if (equal) ++result.n_accepted;",
        "++result.n_accepted;",
        "tests/python/test_generate_drafts.py -k half_right",
    ),
    Mutation(
        "after a rejection the target draws as if there had been no draft",
        "csrc/draft/verify.cpp",
        "std::max(0.0F, p[v] - q[v]);",
        "p[v];",
        "tests/python/test_generate_rejection.py -k own",
    ),
    Mutation(
        "what is left after a rejection does not sum to one",
        "csrc/draft/distribution.hpp",
        "if (sum > point * total) return i;",
        "if (sum > point) return i;",
        "tests/python/test_generate_rejection.py -k own",
    ),
    Mutation(
        "all sequences are verified with the logits of the first",
        "python/llamatap/_loop.py",
        "sequence.first_row, sequence.first_output = len(batch), n_outputs\n",
        "sequence.first_row, sequence.first_output = 0, n_outputs\n",
        "tests/python/test_generate_drafts.py -k half_right",
    ),
    Mutation(
        "states of tokens are those of the next row",
        "python/llamatap/_loop.py",
        "sequence.keep_rows(states, first, first + n_stood + 1)",
        "sequence.keep_rows(states, first + 1, first + n_stood + 2)",
        "tests/python/test_generate_states.py",
    ),
    Mutation(
        "pieces of a prompt's states lie on one another",
        "python/llamatap/_sequence.py",
        "piece = self.prompt_rows[self.fed - n : self.fed]",
        "piece = self.prompt_rows[:n]",
        "tests/python/test_session_states.py",
    ),
    Mutation(
        "after a failure the texts under way stay in memory",
        "python/llamatap/session.py",
        "                    undo.push(tidying(self._loop.drop))\n",
        "",
        "tests/python/test_session_errors.py",
    ),
    Mutation(
        "after a saved state a token is left out",
        "python/llamatap/_rewind.py",
        "sequence.tokens[-n_accepted - 2 : -1]",
        "sequence.tokens[-n_accepted - 1 : -1]",
        "tests/python/test_generate_hybrid_drafters.py -k qwen35",
    ),
    Mutation(
        "all prompts draw their drafts alike",
        "python/llamatap/_loop.py",
        "min(longest, rooms[one.seq]), one.sampler.seed",
        "min(longest, rooms[one.seq]), 0",
        "tests/python/test_generate_rejection.py -k every_seed",
    ),
    Mutation(
        "SGLang's ids are taken for ours",
        "python/llamatap/layers.py",
        'Convention("sglang", 1)',
        'Convention("sglang", 0)',
        "tests/python/test_layers.py",
    ),
    Mutation(
        "a saved state fits any weights",
        "python/llamatap/context.py",
        '            "weights": self.model.sample,\n            "converted_to": self.model.weights,\n',
        "",
        "tests/python/test_context.py",
    ),
    Mutation(
        "the last row of a sample predicts the first of the next one",
        "python/llamatap/train/batch.py",
        "    counts[1:][documents[1:] != documents[:-1]] = 0\n",
        "",
        "tests/python/test_train_batch.py",
    ),
    Mutation(
        "prompts count for the loss",
        "python/llamatap/generation.py",
        "    generated[: len(tokens) - len(states)] = 0\n",
        "",
        "tests/python/test_train_sources.py",
    ),
    Mutation(
        "a dead writer's memory stays",
        "python/llamatap/connectors/shared_memory.py",
        "            yield True\n",
        "            yield False\n",
        "tests/python/test_connectors.py",
    ),
    Mutation(
        "a file has the token ids of another sample",
        "python/llamatap/dataset/layouts/speculators.py",
        "        sample = self.samples[index]\n",
        "        sample = self.samples[index - 1]\n",
        "tests/python/test_dataset_write.py",
    ),
    Mutation(
        "layers lie in another order",
        "python/llamatap/dataset/layouts/npy.py",
        "states[:, column]",
        "states[:, -1 - column]",
        "tests/python/test_dataset_layouts.py -k npy",
    ),
    Mutation(
        "the last layer that speculators reads is normed",
        "python/llamatap/dataset/_job.py",
        "else (*found, last)",
        'else (*found, "norm")',
        "tests/python/test_dataset_write.py",
    ),
    Mutation(
        "samples are cut on the left",
        "python/llamatap/dataset/samples.py",
        "tokens[: how.max_length], mask[: how.max_length]",
        "tokens[-how.max_length :], mask[-how.max_length :]",
        "tests/python/test_dataset_input.py -k longer",
    ),
    Mutation(
        "the token that ends a turn does not count",
        "python/llamatap/dataset/_masking.py",
        "chosen[first:last] = True",
        "chosen[first : last - 1] = True",
        "tests/python/test_dataset_masks.py",
    ),
    Mutation(
        "what was computed is lost with the process",
        "python/llamatap/dataset/_computed.py",
        "            scratch.replace(path)\n",
        "            scratch.unlink()\n",
        "tests/python/test_dataset_resume.py -k next_run",
    ),
    Mutation(
        "files cut short are taken for whole",
        "python/llamatap/dataset/layouts/_layout.py",
        ".stat().st_size == size",
        ".stat().st_size > 0",
        "tests/python/test_dataset_resume.py -k cut_short",
    ),
    Mutation(
        "the predicted size forgets what fills up headers",
        "python/llamatap/dataset/layouts/speculators.py",
        "(length + 7) // 8 * 8",
        "length",
        "tests/python/test_dataset_write.py",
    ),
    Mutation(
        "a forked child keeps a writer's lock",
        "python/llamatap/_locks.py",
        "os.register_at_fork(after_in_child=_in_child)\n",
        "",
        "tests/python/test_connectors.py -k fork",
    ),
    Mutation(
        "shared memory has no bound",
        "python/llamatap/connectors/shared_memory.py",
        "if (taken := self._taken(path)) + needed > self.max_bytes:",
        "if (taken := self._taken(path)) < 0:",
        "tests/python/test_connectors.py -k bound",
    ),
    Mutation(
        "the end of a long response is cut off",
        "python/llamatap/train/batch.py",
        "        start = end - length\n",
        "        start = begin\n",
        "tests/python/test_train_batch.py",
    ),
    Mutation(
        "a drafter learns the state that it is given",
        "python/llamatap/train/batch.py",
        "last[None, 1:]",
        "last[None, :-1]",
        "tests/python/test_train_batch.py",
    ),
    Mutation(
        "one step too many is trained on",
        "python/llamatap/train/buffer.py",
        "first = self._step - n + 1",
        "first = self._step - n",
        "tests/python/test_train_buffer.py",
    ),
    Mutation(
        "states stay over the steps",
        "python/llamatap/train/buffer.py",
        "if not self.store_hidden_states:",
        "if False:",
        "tests/python/test_train_buffer.py",
    ),
    Mutation(
        "samples with NaN are trained on",
        "python/llamatap/train/batch.py",
        "if not sample.finite:",
        "if False:",
        "tests/python/test_train_batch.py",
    ),
    Mutation(
        "the last layer comes without its norm",
        "python/llamatap/serve/hidden_states.py",
        'wanted, source="transformers", n_layer=model.n_layer, final_norm=layer_map.has_norm',
        'wanted, source="transformers", n_layer=model.n_layer, final_norm=False',
        "tests/python/test_serve_hidden_states.py -k count",
    ),
    Mutation(
        "prompts are cut on the left",
        "python/llamatap/serve/hidden_states.py",
        "whole[: self.max_length]",
        "whole[-self.max_length :]",
        "tests/python/test_serve_hidden_states.py -k defaults",
    ),
    Mutation(
        "prompts of a batch get each other's states",
        "python/llamatap/serve/worker.py",
        "for job, states in zip(jobs, found, strict=True):\n                self._give",
        "for job, states in zip(jobs, found[::-1], strict=True):\n                self._give",
        "tests/python/test_serve_hidden_states.py -k lists",
    ),
    Mutation(
        "pieces of base64 are padded",
        "python/llamatap/serve/payload.py",
        "_PIECE = 3 * 2**16",
        "_PIECE = 2**16",
        "tests/python/test_serve_load.py -k many",
    ),
    Mutation(
        "all texts of a prompt have one seed",
        "python/llamatap/serve/text_job.py",
        "number * 0x9E3779B1",
        "0",
        "tests/python/test_serve_completions.py -k several",
    ),
    Mutation(
        "states of a text come without its prompt's",
        "python/llamatap/serve/text_job.py",
        "entries = [as_lists(prompt), *",
        "entries = [",
        "tests/python/test_serve_completions.py -k hidden_states",
    ),
    Mutation(
        "any host that begins like this machine's is let in",
        "python/llamatap/serve/limits.py",
        'return host == "localhost"',
        'return host.startswith("127.") or host == "localhost"',
        "tests/python/test_serve_admission.py -k host",
    ),
    Mutation(
        "memory is not given back",
        "python/llamatap/serve/budget.py",
        "self.free += n_bytes",
        "pass",
        "tests/python/test_serve_admission.py -k memory",
    ),
    Mutation(
        "texts whose client is gone go on",
        "python/llamatap/serve/worker.py",
        "if text.gone.is_set():\n                assert",
        "if False:\n                assert",
        "tests/python/test_serve_concurrency.py -k frees",
    ),
    Mutation(
        "a preset keeps all rows",
        "python/llamatap/serve/hidden_states.py",
        "window = None if self.preset is None else self.preset.rows",
        "window = None",
        "tests/python/test_serve_hidden_states.py -k ones_own",
    ),
    Mutation(
        "texts that failed beside others end",
        "python/llamatap/serve/worker.py",
        "if len(texts) > 1 and not (text.streamed and text.begun):",
        "if False:",
        "tests/python/test_serve_concurrency.py -k together",
    ),
    Mutation(
        "a long prompt takes the whole round",
        "python/llamatap/_loop.py",
        "-(-left // 2)",
        "left",
        "tests/python/test_session.py -k long",
    ),
    Mutation(
        "extraction cannot be cancelled while the engine works",
        "python/llamatap/extract.py",
        "            ],\n            self.cancelled,\n",
        "            ],\n            None,\n",
        "tests/python/test_extract_cancel.py",
    ),
    Mutation(
        "passes whose client is gone go on",
        "python/llamatap/serve/worker.py",
        "                job.gone.set()\n                job.result",
        "                job.result",
        "tests/python/test_serve_concurrency.py -k leaves",
    ),
    Mutation(
        "a client that leaves ends the pass for all",
        "python/llamatap/serve/worker.py",
        "all(job.gone.is_set() for job in jobs)",
        "any(job.gone.is_set() for job in jobs)",
        "tests/python/test_serve_concurrency.py -k leaves",
    ),
]


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def first_failure(tests: str) -> str | None:
    """Install the checkout and run the tests: the first that fails, if any does."""
    installed = run(["make", ".venv/.installed"])
    if installed.returncode != 0:
        sys.exit(f"the mutant does not build:\n{installed.stdout[-3000:]}{installed.stderr[-3000:]}")
    result = run([str(PYTHON), "-m", "pytest", "-x", "-q", "--tb=no", *tests.split()])
    for line in result.stdout.splitlines():
        if line.startswith(("FAILED ", "ERROR ")):
            # "FAILED name - reason", where a name may hold spaces.
            return line.partition(" ")[2].partition(" - ")[0].removeprefix("tests/python/")
    # An abort leaves no summary.
    return f"{tests} (signal {-result.returncode})" if result.returncode < 0 else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Break the code, and show that tests fail.")
    parser.add_argument("--only", help="a part of a mutation's name")
    arguments = parser.parse_args()
    if run(["git", "status", "--porcelain", "csrc", "python"]).stdout:
        sys.exit("csrc/ or python/ has changes that are not committed")
    for mutation in MUTATIONS:
        count = (ROOT / mutation.path).read_text().count(mutation.old)
        if count != 1:
            sys.exit(f"{mutation.what}: {mutation.old!r} occurs {count} times in {mutation.path}")
    lines = []
    survived = []
    for mutation in MUTATIONS:
        if arguments.only and arguments.only not in mutation.what:
            continue
        path = ROOT / mutation.path
        good = path.read_text()
        path.write_text(good.replace(mutation.old, mutation.new))
        try:
            failed = first_failure(mutation.tests)
        finally:
            path.write_text(good)
        print(f"{mutation.what}: {failed or 'SURVIVED'}", flush=True)
        if failed is None:
            survived.append(mutation.what)
        lines.append(f"| {mutation.what} | {mutation.path} | {failed} |")
    run(["make", ".venv/.installed"])
    if survived:
        sys.exit("not seen by any test: " + "; ".join(survived))
    if not arguments.only:
        TABLE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
