"""``llamatap conversations``: let a chat model write questions and answer them."""

from __future__ import annotations

import argparse
import sys
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING

from llamatap._validate import shown
from llamatap.commands._arguments import (
    add_loading,
    add_model,
    add_threads,
    given,
    integers,
    load_model,
    read_text,
)
from llamatap.commands._progress import progress_bar
from llamatap.context_options import ContextOptions
from llamatap.errors import InvalidInputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from llamatap import Model
    from llamatap.train.conversation_file import ConversationFile
    from llamatap.train.conversations import TurnFrame

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
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the output, which grows line by line; with more --tokens, extend it",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    add_threads(parser)
    add_loading(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from llamatap.storage.model_files import ModelFiles
    from llamatap.train.conversation_file import ConversationFile
    from llamatap.train.conversations import turn_frame

    temperatures = _numbers(arguments.temperatures)
    with load_model(arguments) as model:
        frame = turn_frame(model)
        questions = None if arguments.questions is None else _questions(model, arguments.questions)
        options = {
            "model": ModelFiles(arguments.model).sampled_sha256,
            "questions": None if questions is None else sha256("\n".join(questions).encode()).hexdigest(),
            "temperatures": temperatures,
            "keep_loops": arguments.keep_loops,
            "max_answer": arguments.max_answer,
            "seed": arguments.seed,
        }
        with ConversationFile(arguments.output, options, frame, resume=arguments.resume) as file:
            try:
                _sample(arguments, model, frame, questions, temperatures, file)
                interrupted = False
            except KeyboardInterrupt:
                interrupted = True
    found = f"{arguments.output}: {len(file.questions)} conversations, {file.n_tokens} tokens"
    if interrupted:
        print(f"interrupted; {found}; continue with --resume", file=sys.stderr)
        return 130
    print(found, file=sys.stderr)
    return 0


def _sample(
    arguments: argparse.Namespace,
    model: Model,
    frame: TurnFrame,
    questions: dict[str, NDArray[np.int32]] | None,
    temperatures: list[float],
    file: ConversationFile,
) -> None:
    """Sample the conversations that the file lacks."""
    from llamatap.train.conversations import sample_conversations

    n_seq = arguments.parallel
    wanted = arguments.tokens or (200_000 if questions is None else 2**40)
    if file.n_tokens >= wanted:
        return
    longest = 192 if questions is None else max(map(len, questions.values()))
    room = len(frame.before) + longest + len(frame.after) + arguments.max_answer
    by_question = questions is not None and arguments.tokens is None
    total = len(questions or ()) if by_question else wanted
    unit, there = (" questions", len(file.questions)) if by_question else (" tokens", file.n_tokens)
    options = given(ContextOptions, arguments)
    with (
        model.context(
            n_ctx=n_seq * room, n_seq_max=n_seq, n_outputs_max=n_seq, kv_unified=False, **options
        ) as context,
        progress_bar(total, unit, quiet=arguments.quiet, unit_scale=True, initial=there) as bar,
    ):
        for found in sample_conversations(
            context,
            wanted - file.n_tokens,
            seed=arguments.seed,
            temperatures=temperatures,
            max_answer_tokens=arguments.max_answer,
            questions=None if questions is None else questions.values(),
            frame=frame,
            keep_loops=arguments.keep_loops,
            asked=file.questions,
        ):
            file.add(found)
            bar.update(1 if by_question else len(found.input_ids))


def _questions(model: Model, path: Path) -> dict[str, NDArray[np.int32]]:
    """The tokens of the questions in a file, one on a line, each once."""
    lines = [line for line in read_text(path).splitlines() if line.strip()]
    if not lines:
        raise InvalidInputError(f"{path} holds no questions")
    return {line: model.tokenize(line, add_special=False) for line in lines}


def _numbers(text: str) -> list[float]:
    try:
        return [float(one) for one in text.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"--temperatures: expected numbers, {shown('0,0.8')}; found {shown(text)}"
        ) from None
