"""User-defined drafters with invalid drafts or errors: the error comes out, and the next text is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from support.generation import PROMPT, CheckedContext, Guessing, Noting, is_empty

import llamatap
from llamatap._engine_context import engine_of

#: Untyped, for what a type checker would refuse.
lt: Any = llamatap

NAN, INF = float("nan"), float("inf")


class Wrong(Noting):
    """Drafts normally a number of times, then does something else."""

    def __init__(self, action: Callable[[Mapping[int, Any]], Any], after: int = 2) -> None:
        super().__init__()
        self.action = action
        self.after = after

    def draft(self, requests: Mapping[int, Any]) -> Any:
        self.after -= 1
        return super().draft(requests) if self.after >= 0 else self.action(requests)


def each(value: Callable[[], Any]) -> Callable[[Mapping[int, Any]], Any]:
    return lambda requests: {seq: value() for seq in requests}


def tokens(value: Any) -> Callable[[Mapping[int, Any]], Any]:
    return each(lambda: lt.Draft(value))


#: Invalid drafts, and the exceptions that they raise.
JUNK: dict[str, Callable[[Mapping[int, Any]], Any]] = {
    "None for all": lambda requests: None,
    "a list for all": lambda requests: [lt.Draft(np.array([5], np.int32))],
    "a number for one": each(lambda: 0),
    "a list for one": each(lambda: [5, 6]),
    "an array for one": each(lambda: np.array([5], np.int32)),
    "tokens beyond the vocabulary": tokens(np.array([5, 259], np.int32)),
    "negative tokens": tokens(np.array([-1], np.int32)),
    "tokens of two dimensions": tokens(np.zeros((2, 2), np.int32)),
    "a token of no dimension": tokens(np.array(5)),
    "floats": tokens(np.array([5.0])),
    "bools": tokens(np.array([True])),
    "text": tokens("ab"),
    "None": tokens(None),
    "objects": tokens(np.array([None])),
    "beyond 64 bits": tokens([2**70]),
    "more probs than tokens": each(lambda: lt.Draft(np.array([5], np.int32), np.ones(3, np.float32))),
}


@pytest.mark.parametrize("after", [0, 3])
@pytest.mark.parametrize("name", JUNK)
def test_junk_of_a_drafter_is_no_draft(name: str, after: int, checked: CheckedContext) -> None:
    with pytest.raises(lt.InvalidInputError):
        list(lt.generate(checked.context, [PROMPT] * 2, Wrong(JUNK[name], after), max_tokens=12))
    assert is_empty(checked.context)


@pytest.mark.parametrize(
    "found", ["a", 5.5, [[5, 6]], [259], [-1], np.array([0.5]), {5}, [None], [2**40]], ids=str
)
def test_junk_of_a_function_is_no_draft(found: Any, checked: CheckedContext) -> None:
    with pytest.raises(
        lt.InvalidInputError, match=r"CallableDrafter\.guess\(\) did not return|drafted token ids"
    ):
        list(lt.generate(checked.context, PROMPT, lambda tokens: found, max_tokens=12))


TOO_LONG: dict[str, Any] = {
    "None": None,
    "an empty list": [],
    "an empty tuple": (),
    "an empty array": np.zeros(0, np.int64),
    "an empty array of floats": np.zeros(0),
    "thousands of tokens": [5] * 5000,
    "a range": range(9),
}


@pytest.mark.parametrize("name", TOO_LONG)
def test_drafts_that_are_empty_or_too_long_are_fine(name: str, checked: CheckedContext) -> None:
    """Drafts that are too long are cut to a function's n_max or to the room that is left."""
    found = TOO_LONG[name]
    for drafter in (
        lambda tokens: found,
        Wrong(tokens(np.array([] if found is None else found, np.int32)), 0),
    ):
        options = {"max_tokens": 12, "ignore_eos": True}
        texts = list(lt.generate(checked.context, [PROMPT] * 3, drafter, **options))
        assert [one.tokens.tolist() for one in texts] == [checked.expected] * 3
        assert all(len(one.stats.drafted_at) <= 10 for one in texts)


def test_drafts_of_sequences_that_were_not_asked_for_are_left_alone(checked: CheckedContext) -> None:
    draft = llamatap.Draft(np.array([5], np.int32))
    drafter = Wrong(lambda requests: {-1: draft, 7: draft, "x": draft, 0: draft}, 0)
    found = list(lt.generate(checked.context, [PROMPT] * 2, drafter, max_tokens=12, ignore_eos=True))
    assert [one.tokens.tolist() for one in found] == [checked.expected] * 2


def distributions(value: Any) -> Callable[[Mapping[int, Any]], Any]:
    return each(lambda: lt.Draft(np.array([5, 6], np.int32), None, value))


ONE_HOT = np.eye(259, dtype=np.float32)

WRONG_DISTRIBUTIONS: dict[str, Any] = {
    "none": None,
    "of too few tokens": ONE_HOT[5:6],
    "of another vocabulary": np.full((2, 258), 1 / 258, np.float32),
    "of one dimension": ONE_HOT[5],
    "without the token": ONE_HOT[7:9],
    "NaN": np.full((2, 259), NAN, np.float32),
    "infinity": np.where(ONE_HOT[5:7] > 0, INF, ONE_HOT[5:7]),
    "of sums above 1": ONE_HOT[5:7] * np.float32(1.01),
    "of sums below 1": ONE_HOT[5:7] * np.float32(0.99),
    "negative ones": ONE_HOT[5:7] * 2 - ONE_HOT[6:8],
    "text": "ab",
    "lists of text": [["a"] * 259] * 2,
}


@pytest.mark.parametrize("name", WRONG_DISTRIBUTIONS)
def test_distributions_that_are_none(name: str, checked: CheckedContext) -> None:
    drafter = Wrong(distributions(WRONG_DISTRIBUTIONS[name]), 0)
    with pytest.raises(lt.InvalidInputError, match="distribution"):
        list(lt.generate(checked.context, PROMPT, drafter, max_tokens=9, temperature=1.0, rejection=True))


@pytest.mark.parametrize("made", [lt.NGramDrafter(2, 1), lambda tokens: tokens[-2:], [lt.NGramDrafter(2, 1)]])
def test_a_drafter_that_does_not_draw_is_refused_with_rejection(made: Any, checked: CheckedContext) -> None:
    """When generate is called, not at the first draft."""
    with pytest.raises(lt.InvalidInputError, match="temperature above 0"):
        lt.generate(checked.context, [5, 6] * 9, made, max_tokens=9, rejection=True)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, MemoryError, StopIteration])
@pytest.mark.parametrize("where", ["draft", "process", "accept", "reset"])
def test_what_a_drafter_raises_comes_out(
    where: str, error: type[BaseException], checked: CheckedContext
) -> None:
    """Wherever it is raised, the KV cache is empty afterwards and no tap is open."""

    class Raising(Guessing):
        calls = 0
        target_layers = (1, "norm")

    def failing(self: Any, *arguments: Any) -> Any:
        self.calls += 1
        if self.calls == (2 if where == "reset" else 4):
            raise error("of mine")
        return getattr(Guessing, where)(self, *arguments)

    setattr(Raising, where, failing)
    drafter = Raising(259, [[*PROMPT, *checked.expected]], wrong=0.5)
    # A StopIteration would end the generator unnoticed; Python makes it a RuntimeError.
    with pytest.raises(RuntimeError if error is StopIteration else error):
        list(lt.generate(checked.context, [PROMPT] * 4, drafter, max_tokens=12, ignore_eos=True))
    assert is_empty(checked.context)
    assert engine_of(checked.context).capture is None


@pytest.mark.parametrize("wrapped", ["alone", "in a list", "in a chain"])
def test_a_drafter_that_takes_no_states_is_refused(wrapped: str, checked: CheckedContext) -> None:
    class Old(llamatap.NGramDrafter):
        def process(self, batch: llamatap.Batch) -> None:  # type: ignore[override]
            pass

    makers: dict[str, Callable[[], Any]] = {
        "alone": Old,
        "in a list": lambda: [llamatap.NGramDrafter(), Old()],
        "in a chain": lambda: llamatap.DrafterChain(Old()),
    }
    calls: list[Callable[[], Any]] = [
        lambda: lt.generate(checked.context, PROMPT, makers[wrapped]()),
        lambda: lt.Session(checked.context, makers[wrapped]()),
    ]
    for call in calls:
        with pytest.raises(TypeError, match=r"Old.process .* def process\(self, batch, states=None\)"):
            call()


def test_all_drafters_are_reset_though_one_fails(checked: CheckedContext) -> None:
    """The next generation finds those that did not fail as new."""

    class Failing(Noting):
        failed = False

        def draft(self, requests: Mapping[int, Any]) -> Any:
            self.failed = True
            raise RuntimeError("of mine")

        def reset(self, seq: int) -> None:
            super().reset(seq)
            if self.failed:
                raise RuntimeError("again")

    ngram, noting = lt.NGramDrafter(2, 1), Noting()
    with pytest.raises(RuntimeError, match="of mine"):
        list(lt.generate(checked.context, [PROMPT] * 2, [noting, ngram, Failing()], max_tokens=9))
    assert is_empty(checked.context)
    assert noting.texts == {}
    found = list(lt.generate(checked.context, [PROMPT] * 3, [noting, ngram], max_tokens=12, ignore_eos=True))
    assert [one.tokens.tolist() for one in found] == [checked.expected] * 3


@pytest.mark.parametrize("layers", [None, 5, "norm!", [99], [1.5]], ids=str)
def test_layers_that_are_none_are_refused(layers: Any, checked: CheckedContext) -> None:
    drafter = Noting()
    drafter.target_layers = layers
    with pytest.raises(lt.InvalidInputError, match="layer"):
        list(lt.generate(checked.context, PROMPT, drafter, max_tokens=3))


@pytest.mark.parametrize("requests", [None, [1], {0: None}, {0: (5, 3, 4)}], ids=str)
def test_requests_that_are_none_are_refused(requests: Any) -> None:
    for drafter in (
        lt.NGramDrafter(),
        lt.CallableDrafter(lambda tokens: []),
        lt.DrafterChain(lt.NGramDrafter()),
    ):
        with pytest.raises(lt.InvalidInputError, match="requests must be a dict of DraftRequest"):
            drafter.draft(requests)
