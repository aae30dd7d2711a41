"""On-policy conversations: a chat model writes the user's question and then its own answer.

A drafter learns fastest from what its target says itself. Given only the opening of a user's turn, a chat
model writes a question (Magpie, https://arxiv.org/abs/2406.08464), and then answers it. Nothing is
downloaded, and the token ids are those of the generation: nothing is tokenized again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llamatap._validate import flag, instance, integer, number
from llamatap.context import Context
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.generation.results import Generation
from llamatap.generation.session import Session
from llamatap.loaded_model import LoadedModel

__all__ = ["Conversation", "TurnFrame", "sample_conversations", "turn_frame", "without_loop"]

# So many useless questions one after another are those of a model that writes no questions.
_MAX_DROPPED = 256
# A loop is at most so many tokens long, and repeats so often and over so many tokens that no list does.
_LOOP, _LOOP_REPEATS, _LOOP_TOKENS = 64, 4, 24
# No template writes it, and no tokenizer has a token of it.
_MARK = "\x02llamatap\x03"
# Questions whose first and last characters tokenizers join with others in different ways.
_PROBES = ("What is 2 + 2?", "a list: 1, 2, 3", "Explain this.", "(why)", "日本語", '"No"', "def f():")


@dataclass(frozen=True, slots=True, eq=False)
class Conversation:
    """A question and its answer.

    :ivar input_ids: int32 ``(n,)``: the whole text, template included.
    :ivar loss_mask: uint8 ``(n,)``: 1 for the tokens of the answer, its end token included.
    :ivar question: int32 ``(n_question,)``: the tokens of the question alone.
    :ivar temperature: temperature of the answer.
    :ivar finish_reason: how the answer ended, as in :class:`llamatap.Generation`.
    """

    input_ids: NDArray[np.int32]
    loss_mask: NDArray[np.uint8]
    question: NDArray[np.int32]
    temperature: float
    finish_reason: str

    def row(self) -> dict[str, Any]:
        """A row for ``llamatap dataset`` and ``llamatap train``: ``input_ids`` and ``loss_mask``."""
        return {"input_ids": self.input_ids.tolist(), "loss_mask": self.loss_mask.tolist()}


@dataclass(frozen=True, slots=True, eq=False)
class TurnFrame:
    """What a chat template writes around the first question.

    :ivar before: int32: tokens up to the question.
    :ivar after: int32: tokens from the question's end to the beginning of the answer.
    """

    before: NDArray[np.int32]
    after: NDArray[np.int32]


def turn_frame(model: LoadedModel, *, chat_template: str | None = None, **variables: Any) -> TurnFrame:
    """The tokens that a model's chat template puts around a question.

    :param chat_template: instead of the model's own.
    :param variables: variables of the template.
    :raises InvalidInputError: the template does not write a question once and unchanged, or the tokenizer
        joins its first or last characters with the template's.
    :raises UnsupportedError: the model has no template.
    """
    if chat_template is not None:
        variables["template"] = chat_template

    def rendered(question: str) -> str:
        message = [{"role": "user", "content": question}]
        return model.apply_chat_template(message, add_generation_prompt=True, **variables)

    parts = rendered(_MARK).split(_MARK)
    if len(parts) != 2:
        raise InvalidInputError(
            f"the chat template must write the question once and unchanged; it wrote it {len(parts) - 1} "
            "times"
        )
    before = model.tokenize(parts[0], add_special=True, parse_special=True)
    after = model.tokenize(parts[1], add_special=False, parse_special=True)
    for question in _PROBES:
        tokens = model.tokenize(rendered(question), add_special=True, parse_special=True)
        inside = tokens[len(before) : len(tokens) - len(after)]
        if not np.array_equal(np.concatenate([before, inside, after]), tokens):
            raise InvalidInputError(
                "the tokens of the chat template and of the question must not depend on each other; the "
                f"tokenizer joins them in {parts[0][-20:] + question + parts[1][:20]!r}"
            )
    return TurnFrame(before, after)


def without_loop(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Cut an answer that ends in a loop after the second round of the loop.

    Small models fall into loops, most of all at temperature 0, and then fill an answer up to its limit.

    :param tokens: int32 ``(n,)``: the answer.
    :returns: the beginning of ``tokens`` up to the end of the second round of at most 64 tokens that are
        repeated up to the end at least four times and over 24 tokens; ``tokens`` if there are none.
    """
    for period in range(1, min(_LOOP, len(tokens) // _LOOP_REPEATS) + 1):
        differs = np.flatnonzero(tokens[period:] != tokens[:-period])
        first = int(differs[-1]) + 1 if len(differs) else 0
        if len(tokens) - first >= max(_LOOP_REPEATS * period, _LOOP_TOKENS):
            return tokens[: first + 2 * period]
    return tokens


def sample_conversations(
    context: Context,
    n_tokens: int,
    *,
    seed: int = 0,
    question_temperature: float = 1.0,
    temperatures: Iterable[float] = (0.0, 0.8),
    max_question_tokens: int = 192,
    max_answer_tokens: int = 512,
    questions: Iterable[NDArray[np.int32]] | None = None,
    frame: TurnFrame | None = None,
    keep_loops: bool = False,
    asked: Iterable[NDArray[np.int32]] = (),
) -> Iterator[Conversation]:
    """Sample conversations until they hold enough tokens. Unfinished and repeated questions are dropped.

    :param context: a context with an empty memory; as many conversations as it has sequences run at once.
    :param n_tokens: the number of tokens of all conversations together, template included, at least.
    :param seed: the same one gives the same conversations, in a context with the same options.
    :param question_temperature: temperature of the questions.
    :param temperatures: temperatures of the answers, taken in turn.
    :param max_question_tokens: longer questions are dropped.
    :param max_answer_tokens: longer answers are cut.
    :param questions: answer these instead of sampling some; sampling ends with them.
    :param frame: as :func:`turn_frame` gives it, which is the default.
    :param keep_loops: keep answers that end in a loop whole, instead of cutting them as :func:`without_loop`
        does.
    :param asked: the questions that earlier calls with this seed gave, int32 ``(n_question,)`` each; they are
        not asked again, and the seeds go on after them.
    :raises InvalidInputError: an argument is wrong.
    :raises UnsupportedError: the model has no chat template, or one without an end token after questions, or
        generates no text; or of 256 questions in a row, none is finished and new.
    """
    instance("context", context, Context)
    integer("n_tokens", n_tokens, 1, 2**62)
    integer("max_question_tokens", max_question_tokens, 1)
    integer("max_answer_tokens", max_answer_tokens, 1)
    answer_temperatures = [number("temperatures", one) for one in temperatures]
    if not answer_temperatures:
        raise InvalidInputError("temperatures must have at least one number")
    frame = turn_frame(context.model) if frame is None else frame
    if questions is None and not (
        len(frame.after) and context.model.is_end_of_generation(int(frame.after[0]))
    ):
        raise UnsupportedError(
            "a question must end in a token that ends a text, or the model goes on and answers itself; the "
            f"chat template writes {context.model.detokenize(frame.after)!r} after it. Give questions of "
            "your own (questions=, --questions)"
        )
    seen = [np.asarray(question, np.int32).tobytes() for question in asked]
    work = _Work(
        context,
        frame,
        np.random.default_rng([integer("seed", seed, 0), len(seen)]),
        number("question_temperature", question_temperature),
        answer_temperatures,
        max_question_tokens,
        max_answer_tokens,
        None if questions is None else iter(questions),
        flag("keep_loops", keep_loops),
        set(seen),
    )
    return work.run(n_tokens)


class _Work:
    """Sampling in a session: each question is a request, and its answer another one."""

    def __init__(
        self,
        context: Context,
        frame: TurnFrame,
        rng: np.random.Generator,
        question_temperature: float,
        temperatures: list[float],
        max_question_tokens: int,
        max_answer_tokens: int,
        questions: Iterator[NDArray[np.int32]] | None,
        keep_loops: bool,
        seen: set[bytes],
    ) -> None:
        self._context, self._frame, self._rng = context, frame, rng
        self._question_temperature, self._temperatures = question_temperature, temperatures
        self._max_question_tokens, self._max_answer_tokens = max_question_tokens, max_answer_tokens
        self._questions, self._keep_loops = questions, keep_loops
        self._seen = seen
        self._asking: set[int] = set()
        self._answering: dict[int, tuple[NDArray[np.int32], float]] = {}

    def run(self, n_tokens: int) -> Iterator[Conversation]:
        """Sample until the conversations hold ``n_tokens``, or until there are no more questions."""
        sampled = n_dropped = 0
        with Session(self._context) as session:
            self._refill(session)
            while session.pending:
                for event in session.step():
                    if event.final is None:
                        continue
                    if event.index in self._asking:
                        self._asking.remove(event.index)
                        question = _question(self._context.model, event.final)
                        asked = question is not None and self._answer(session, question)
                        n_dropped = 0 if asked else n_dropped + 1
                        if n_dropped == _MAX_DROPPED:
                            raise UnsupportedError(
                                f"of {n_dropped} questions in a row that {self._context.model.path.name} "
                                "wrote, none was finished and new; give questions, or a higher "
                                "question_temperature or max_question_tokens"
                            )
                        continue
                    found = _conversation(event.final, *self._answering.pop(event.index), self._keep_loops)
                    sampled += len(found.input_ids)
                    yield found
                    if sampled >= n_tokens:
                        return
                self._refill(session)

    def _refill(self, session: Session) -> None:
        # One round admits those that wait, so a few more than run at once are enough.
        while len(session) < 2 * self._context.n_seq_max:
            if self._questions is None:
                self._asking.add(
                    session.add(
                        self._frame.before,
                        max_tokens=self._max_question_tokens,
                        temperature=self._question_temperature,
                        seed=self._seed(),
                    )
                )
            elif (question := next(self._questions, None)) is not None:
                self._answer(session, np.asarray(question, np.int32))
            else:
                return

    def _answer(self, session: Session, question: NDArray[np.int32]) -> bool:
        """Have a question answered, unless it was asked before."""
        key = question.tobytes()
        if key in self._seen:
            return False
        temperature = self._temperatures[len(self._seen) % len(self._temperatures)]
        self._seen.add(key)
        prompt = np.concatenate([self._frame.before, question, self._frame.after])
        index = session.add(
            prompt, max_tokens=self._max_answer_tokens, temperature=temperature, seed=self._seed()
        )
        self._answering[index] = (question, temperature)
        return True

    def _seed(self) -> int:
        return int(self._rng.integers(2**31))


def _question(model: LoadedModel, final: Generation) -> NDArray[np.int32] | None:
    """The tokens of a finished question; None if it has no end, no text, or control tokens in it."""
    if final.finish_reason != "stop" or len(final.tokens) < 2 or not final.text.strip():
        return None
    question = final.tokens[:-1]
    if any(not model.token_bytes(int(token), special=False) for token in question):
        return None
    return question


def _conversation(
    final: Generation, question: NDArray[np.int32], temperature: float, keep_loops: bool
) -> Conversation:
    answer = final.tokens if keep_loops else without_loop(final.tokens)
    tokens = np.concatenate([final.prompt, answer])
    mask = np.zeros(len(tokens), np.uint8)
    mask[len(final.prompt) :] = 1
    return Conversation(tokens, mask, question, temperature, final.finish_reason)
