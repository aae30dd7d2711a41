"""``llamatap conversations``: let a chat model write questions and answer them."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from llamatap._validate import shown
from llamatap.commands._arguments import add_loading, add_model, add_threads, given, integers, load_model
from llamatap.commands._progress import progress_bar
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError

__all__ = ["add", "run"]


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = commands.add_parser(
        "conversations",
        help="let a chat model write questions and answer them: text to train its drafter on",
    )
    add_model(parser)
    parser.add_argument("-o", "--output", type=Path, required=True, metavar="FILE.jsonl")
    parser.add_argument(
        "--tokens",
        type=integers(1),
        help="tokens of all together (default: 200000; with --questions, until all are answered)",
    )
    parser.add_argument(
        "--questions", type=Path, metavar="FILE", help="answer these, one on a line, instead of writing some"
    )
    parser.add_argument(
        "--temperatures", default="0,0.8", help="of the answers, taken in turn (default: 0,0.8)"
    )
    parser.add_argument(
        "--keep-loops",
        action="store_true",
        help="do not cut answers that end in a loop after its second round",
    )
    parser.add_argument("--max-answer", type=integers(1), default=512, metavar="N", help="(default: 512)")
    parser.add_argument("--parallel", type=integers(1, 256), default=32, metavar="N", help="(default: 32)")
    parser.add_argument("--seed", type=integers(0), default=0, help="(default: 0)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_threads(parser)
    add_loading(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.storage.atomic_writes import atomic_path
    from llamatap.train.conversations import sample_conversations, turn_frame

    temperatures = _numbers(arguments.temperatures)
    n_seq, n_tokens, n, interrupted = arguments.parallel, 0, 0, False
    wanted = arguments.tokens or (200_000 if arguments.questions is None else 2**40)
    with load_model(arguments) as model:
        frame = turn_frame(model)
        questions = None
        if arguments.questions is not None:
            lines = arguments.questions.read_text().splitlines()
            questions = [model.tokenize(line, add_special=False) for line in lines if line.strip()]
        longest = max((len(one) for one in questions), default=0) if questions is not None else 192
        room = len(frame.before) + longest + len(frame.after) + arguments.max_answer
        options = given(ContextOptions, arguments)
        with (
            model.context(
                n_ctx=n_seq * room, n_seq_max=n_seq, n_outputs_max=n_seq, kv_unified=False, **options
            ) as context,
            atomic_path(arguments.output) as scratch,
            scratch.open("w") as file,
            progress_bar(
                arguments.tokens or wanted, " tokens", quiet=arguments.quiet, unit_scale=True
            ) as bar,
        ):
            try:
                for found in sample_conversations(
                    context,
                    wanted,
                    seed=arguments.seed,
                    temperatures=temperatures,
                    max_answer_tokens=arguments.max_answer,
                    questions=questions,
                    frame=frame,
                    keep_loops=arguments.keep_loops,
                ):
                    file.write(json.dumps(found.row()) + "\n")
                    n += 1
                    n_tokens += len(found.input_ids)
                    bar.update(len(found.input_ids))
            except KeyboardInterrupt:
                # What was sampled is worth keeping.
                interrupted = True
    said = "interrupted; " if interrupted else ""
    print(f"{said}{arguments.output}: {n} conversations, {n_tokens} tokens", file=sys.stderr)
    return 130 if interrupted else 0


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"--temperatures: expected numbers, {shown('0,0.8')}; found {shown(text)}"
        ) from None
