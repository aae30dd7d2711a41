"""Drafters without a model: n-grams and functions of the text, and chains of drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import llamatap as lt


def looked_up(text: Sequence[int], n_longest: int, n_shortest: int, n_max: int) -> list[int]:
    """Oracle: the tokens after the latest earlier occurrence of the last n tokens, for the largest n found.

    Beyond the end of the text the draft continues itself.
    """
    for n in range(min(n_longest, len(text) - 1), n_shortest - 1, -1):
        for start in range(len(text) - n - 1, -1, -1):
            if text[start : start + n] == text[-n:]:
                longer = list(text)
                for at in range(start + n, start + n + n_max):
                    longer.append(longer[at])
                return longer[len(text) :]
    return []


def request(text: Sequence[int], n_max: int = 100) -> lt.DraftRequest:
    return lt.DraftRequest(text[-1], len(text) - 1, n_max)


def tokens_of(drafts: Mapping[int, lt.Draft], seq: int = 0) -> list[int]:
    found: list[int] = drafts[seq].tokens.tolist() if seq in drafts else []
    return found


def after(drafter: lt.Drafter, text: Sequence[int]) -> list[int]:
    """The draft for a new text."""
    drafter.reset(0)
    if len(text) > 1:
        drafter.process(lt.Batch.of(text[:-1]))
    return tokens_of(drafter.draft({0: request(text)}))


def test_what_followed_the_same_tokens_is_drafted() -> None:
    drafter = lt.NGramDrafter(3, 2, n_max=4)
    assert after(drafter, [5, 6, 7, 8, 9, 10, 11, 5, 6]) == [7, 8, 9, 10]
    assert after(drafter, [5, 6, 7, 8, 4, 6, 7]) == [8, 4, 6, 7]
    # The longest n-gram before a later one that is shorter.
    assert after(drafter, [5, 6, 7, 1, 6, 7, 2, 5, 6, 7]) == [1, 6, 7, 2]
    # The last time before an earlier one.
    assert after(drafter, [6, 7, 1, 6, 7, 2, 3, 6, 7]) == [2, 3, 6, 7]
    assert after(drafter, [5, 5, 5, 5]) == [5, 5, 5, 5]
    assert after(drafter, [5, 6, 7]) == []
    assert after(drafter, [5]) == []
    assert after(lt.NGramDrafter(1, 1, n_max=5), [5, 6, 5]) == [6, 5, 6, 5, 6]
    assert after(lt.NGramDrafter(4, 1, n_max=1), [5, 6, 5]) == [6]


def test_a_text_that_was_cut_is_looked_up_as_it_is_now() -> None:
    drafter = lt.NGramDrafter(n_max=8)
    drafter.process(lt.Batch.of([11, 12, 13, 14, 15]))
    assert not drafter.draft({0: lt.DraftRequest(9, 5, 8)})
    drafter.accept(0, 3)
    assert not drafter.draft({0: lt.DraftRequest(15, 4, 8)})
    drafter.process(lt.Batch.of([12, 13, 20, 12], pos0=4))
    assert tokens_of(drafter.draft({0: lt.DraftRequest(13, 8, 3)})) == [20, 12, 13]


def test_short_drafts_are_given_up() -> None:
    text = [5, 6, 7, 5, 6]
    drafter = lt.NGramDrafter(n_max=5, n_min=2)
    drafter.process(lt.Batch.of(text[:-1]))
    for n_max, expected in ((100, [7, 5, 6, 7, 5]), (2, [7, 5]), (1, []), (0, []), (-3, [])):
        assert tokens_of(drafter.draft({0: request(text, n_max)})) == expected


@pytest.mark.fuzz
@given(
    st.lists(st.integers(0, 3), min_size=2, max_size=60),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 9),
)
@settings(max_examples=300, deadline=None, derandomize=True)
def test_drafts_of_any_text_are_those_of_a_plain_search(
    text: list[int], n_longest: int, n_shortest: int, n_max: int
) -> None:
    n_longest, n_shortest = max(n_longest, n_shortest), min(n_longest, n_shortest)
    drafter = lt.NGramDrafter(n_longest, n_shortest, n_max=n_max)
    assert after(drafter, text) == looked_up(text, n_longest, n_shortest, n_max)


@pytest.mark.parametrize("goes_back", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_texts_that_grow_shrink_and_end(seed: int, goes_back: bool) -> None:
    """Three sequences in one drafter, of which the texts are known at each step: what was drafted and not
    accepted, or taken back later, must leave nothing behind."""
    rng = np.random.default_rng(seed)
    n_longest, n_shortest = (4, 2) if seed % 2 else (3, 1)
    drafter = lt.NGramDrafter(n_longest, n_shortest, n_max=6)
    n_tokens = int(rng.integers(2, 5))
    texts: dict[int, list[int]] = {}
    for _ in range(60):
        batch = lt.Batch()
        accepted = {}
        for seq in range(3):
            if seq in texts and rng.random() < 0.05:
                drafter.reset(seq)
                del texts[seq]
            if rng.random() < 0.3:
                continue
            if seq not in texts:
                texts[seq] = rng.integers(0, n_tokens, 10).tolist()
                added = texts[seq][:-1]
                start = 0
            else:
                text = texts[seq]
                if goes_back and rng.random() < 0.2:
                    # The caller rolls back by much more than a draft.
                    del text[int(rng.integers(1, len(text))) :]
                    text.append(int(rng.integers(0, n_tokens)))
                start = len(text) - 1
                added = [text[-1], *rng.integers(0, n_tokens, int(rng.integers(0, 30))).tolist()]
                accepted[seq] = (start, added)
            for position, token in enumerate(added, start):
                batch.add(token, position, seq)
        drafter.process(batch)
        for seq, (start, added) in accepted.items():
            n = int(rng.integers(0, len(added)))
            if n < len(added) - 1 or rng.random() < 0.5:
                drafter.accept(seq, n)
            texts[seq] = [*texts[seq][:start], *added[: n + 1], int(rng.integers(0, n_tokens))]
        drafts = drafter.draft({seq: request(text) for seq, text in texts.items() if rng.random() < 0.7})
        for seq in drafts:
            assert tokens_of(drafts, seq) == looked_up(texts[seq], n_longest, n_shortest, 6)
    drafts = drafter.draft({seq: request(text) for seq, text in texts.items()})
    for seq, text in texts.items():
        assert tokens_of(drafts, seq) == looked_up(text, n_longest, n_shortest, 6)


def test_what_was_taken_back_is_forgotten() -> None:
    """This holds also where the replacement is as long."""
    drafter = lt.NGramDrafter(2, 2, n_max=6)
    drafter.process(lt.Batch.of([1, 2, 3, 4, 5, 6, 7, 8]))
    assert drafter.draft({0: lt.DraftRequest(9, 8, 4)}) == {}
    drafter.process(lt.Batch.of([20, 21, 22, 23, 24, 25], pos0=2))
    text = [1, 2, 20, 21, 22, 23, 24, 25]
    assert tokens_of(drafter.draft({0: lt.DraftRequest(1, 8, 4)})) == []
    drafter.process(lt.Batch.of([20], pos0=8))
    assert tokens_of(drafter.draft({0: request([*text, 20, 21])})) == [22, 23, 24, 25, 20, 21]


def test_a_batch_in_any_order_is_the_text() -> None:
    drafter = lt.NGramDrafter()
    batch = lt.Batch()
    for position in range(4, -1, -1):
        batch.add([5, 6, 7, 8, 5][position], position, [0, 3])
        batch.add([9, 9, 4, 9, 9][position], position, 1)
    drafter.process(batch)
    drafts = drafter.draft({seq: lt.DraftRequest(6 if seq != 1 else 4, 5, 3) for seq in (0, 1, 3)})
    assert {seq: tokens_of(drafts, seq) for seq in (0, 1, 3)} == {0: [7, 8, 5], 1: [9, 9, 4], 3: [7, 8, 5]}


class PromptLookup:
    """A stand-in for llama-cpp-python's LlamaPromptLookupDecoding.

    It is called with the text, positionally, and returns an intc array, empty where nothing is found.
    """

    def __init__(self, max_ngram_size: int = 2, num_pred_tokens: int = 10) -> None:
        self.sizes = (max_ngram_size, num_pred_tokens)
        self.seen: list[NDArray[np.intc]] = []

    def __call__(self, input_ids: NDArray[np.intc], /, **kwargs: Any) -> NDArray[np.intc]:
        assert not kwargs
        self.seen.append(input_ids)
        n, count = self.sizes
        return np.array(looked_up(input_ids.tolist(), n, 1, count), np.intc)


def test_a_function_of_the_text_drafts() -> None:
    function = PromptLookup()
    drafter = lt.CallableDrafter(function, n_max=3)
    drafter.process(lt.Batch.of([5, 6, 7, 8, 5]))
    assert tokens_of(drafter.draft({0: lt.DraftRequest(6, 5, 8)})) == [7, 8, 5]
    (seen,) = function.seen
    assert seen.dtype == np.intc
    assert seen.tolist() == [5, 6, 7, 8, 5, 6]
    drafter.process(lt.Batch.of([6, 7, 8, 5], pos0=5))
    drafter.accept(0, 1)
    assert tokens_of(drafter.draft({0: lt.DraftRequest(9, 7, 8)})) == []
    assert function.seen[-1].tolist() == [5, 6, 7, 8, 5, 6, 7, 9]
    assert tokens_of(drafter.draft({0: lt.DraftRequest(8, 7, 1)})) == [5]
    assert tokens_of(drafter.draft({0: lt.DraftRequest(8, 7, 0)})) == []
    drafter.reset(0)
    drafter.process(lt.Batch.of([4, 4, 4], seq=0))
    assert tokens_of(drafter.draft({0: lt.DraftRequest(4, 3, 8)})) == [4, 4, 4]


def test_functions_keep_sequences_apart() -> None:
    drafter = lt.CallableDrafter(lambda text: text[::-1].tolist())
    batch = lt.Batch()
    batch.add(8, 1, 1)
    batch.add(5, 0, [0, 1])
    drafter.process(batch)
    drafts = drafter.draft({0: lt.DraftRequest(6, 1, 8), 1: lt.DraftRequest(9, 2, 2)})
    assert (tokens_of(drafts), tokens_of(drafts, 1)) == ([6, 5], [9, 8])


@pytest.mark.parametrize("wrong", [[1.5], "ab", [[5, 6]], [2**40], np.zeros((2, 2), np.int32)], ids=str)
def test_a_function_that_gives_no_tokens_is_an_error(wrong: Any) -> None:
    drafter = lt.CallableDrafter(lambda text: wrong)
    drafter.process(lt.Batch.of([5]))
    with pytest.raises(lt.InvalidInputError):
        drafter.draft({0: lt.DraftRequest(6, 1, 8)})


def test_what_a_function_raises_comes_through() -> None:
    def fails(text: NDArray[np.intc]) -> list[int]:
        raise RuntimeError("of the caller's own")

    drafter = lt.CallableDrafter(fails)
    drafter.process(lt.Batch.of([5]))
    with pytest.raises(RuntimeError, match="of the caller's own"):
        drafter.draft({0: lt.DraftRequest(6, 1, 8)})


class Fixed(lt.Drafter):
    """A drafter with fixed drafts that records its calls."""

    def __init__(self, drafts: dict[int, list[int]], layers: tuple[lt.LayerId, ...] = (), n_max: Any = 4):
        self.drafts = drafts
        self.target_layers = layers
        self.n_max = n_max
        self.told: list[Any] = []

    def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
        self.told.append(("process", len(batch)))

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
        self.told.append(("draft", sorted(requests)))
        return {
            seq: lt.Draft(np.array(tokens, np.int32))
            for seq, tokens in self.drafts.items()
            if seq in requests
        }

    def accept(self, seq: int, n: int) -> None:
        self.told.append(("accept", seq, n))

    def reset(self, seq: int) -> None:
        self.told.append(("reset", seq))


def test_a_chain_asks_the_next_for_what_the_first_has_not() -> None:
    first = Fixed({0: [5], 1: []}, (2,), n_max=3)
    second = Fixed({0: [9], 1: [6, 7]}, (2, "norm"), n_max=9)
    third = Fixed({}, (1,))
    chain = lt.DrafterChain(first, second, third)
    assert chain.target_layers == (2, "norm", 1)
    assert chain.n_max == 9
    assert lt.DrafterChain(first, Fixed({}, n_max="auto")).n_max == "auto"
    chain.process(lt.Batch.of([5, 6]))
    drafts = chain.draft({seq: lt.DraftRequest(5, 2, 4) for seq in (0, 1, 2)})
    assert {seq: tokens_of(drafts, seq) for seq in drafts} == {0: [5], 1: [6, 7]}
    chain.accept(1, 2)
    chain.reset(2)
    rest = [("accept", 1, 2), ("reset", 2)]
    assert first.told == [("process", 2), ("draft", [0, 1, 2]), *rest]
    assert second.told == [("process", 2), ("draft", [1, 2]), *rest]
    assert third.told == [("process", 2), ("draft", [2]), *rest]


def test_each_of_a_chain_gets_the_states_that_it_asks_for(tiny_model: lt.Model) -> None:
    found: list[lt.States | None] = []

    class Keeping(Fixed):
        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            found.append(states)

    layers: list[tuple[lt.LayerId, ...]] = [(2, "norm"), (), (-2, 1)]
    chain = lt.DrafterChain(*[Keeping({}, one) for one in layers])
    with tiny_model.context(n_ctx=256) as context:
        list(lt.generate(context, [5, 6, 7], chain, max_tokens=1))
        with context.tap([1, 2, "norm", -2]) as tap:
            context.decode(lt.Batch.of([5, 6, 7]))
    assert found[1] is None
    for states, wanted in ((found[0], layers[0]), (found[2], layers[2])):
        assert states is not None
        expected = tap.states.select(wanted)
        assert states.layers == expected.layers
        assert np.array_equal(states.array, expected.array)


def test_a_chain_whose_first_has_all_asks_no_other() -> None:
    first, second = Fixed({0: [5]}), Fixed({0: [6]})
    assert tokens_of(lt.DrafterChain(first, second).draft({0: lt.DraftRequest(5, 2, 4)})) == [5]
    assert second.told == []


class Raw(Fixed):
    """A function that returns a fixed value."""

    def __init__(self, given: Any) -> None:
        super().__init__({})
        self.given = given

    def draft(self, requests: Mapping[int, lt.DraftRequest]) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([lt.Draft(np.array([5], np.int32))], "dict of drafts by sequence id, not list"),
        (None, "dict of drafts by sequence id, not NoneType"),
        ({0: [1, 2]}, "llamatap.Draft objects, not list"),
        ({0: lt.Draft([1.5])}, "integers"),  # type: ignore[arg-type]
        ({0: lt.Draft(np.array([5], np.int32), "x")}, "probs must be"),  # type: ignore[arg-type]
        ({0: lt.Draft(np.array([5], np.int32), None, [[{}]])}, "distributions must be"),  # type: ignore[arg-type]
    ],
)
def test_a_chain_says_what_is_wrong_with_its_members_drafts(given: Any, message: str) -> None:
    chain = lt.DrafterChain(lt.NGramDrafter(), Raw(given))
    chain.process(lt.Batch.of([5, 6]))
    with pytest.raises(lt.InvalidInputError, match=message):
        chain.draft({0: lt.DraftRequest(5, 2, 4)})


def test_a_chain_asks_each_for_no_more_than_its_own_n_max() -> None:
    asked = []

    class Asked(Fixed):
        def draft(self, requests: Mapping[int, lt.DraftRequest]) -> dict[int, lt.Draft]:
            asked.append({seq: request.n_max for seq, request in requests.items()})
            return super().draft(requests)

    long = list(range(10, 20))
    distributions = np.ones((10, 30), np.float32)
    drawn = lt.Draft(np.array(long, np.int32), distributions[:, 0], distributions)
    chain = lt.DrafterChain(
        Asked({}, n_max=0), Asked({0: long}, n_max=3), Raw({1: drawn, 7: drawn}), Asked({2: long}, n_max=None)
    )
    assert chain.n_max is None
    drafts = chain.draft({seq: lt.DraftRequest(5, 2, 8 - seq) for seq in (0, 1, 2)})
    assert {seq: tokens_of(drafts, seq) for seq in drafts} == {0: long[:3], 1: long[:4], 2: long[:6]}
    assert asked == [{0: 3, 1: 3, 2: 3}, {2: 6}]
    assert drafts[1].probs is not None
    assert drafts[1].distributions is not None
    assert (drafts[1].probs.shape, drafts[1].distributions.shape) == ((4,), (4, 30))


@pytest.mark.parametrize("n_max", [1.5, -1, "all"])
def test_a_chain_of_a_drafter_whose_n_max_is_none_raises(n_max: Any) -> None:
    with pytest.raises(lt.InvalidInputError, match="the drafter's n_max must be"):
        lt.DrafterChain(lt.NGramDrafter(), Fixed({}, n_max=n_max))


@pytest.mark.parametrize("drafters", [(), (5,), (None,), (lt.NGramDrafter(), len), (lt.NGramDrafter,)])
def test_wrong_chains_raise(drafters: tuple[Any, ...]) -> None:
    with pytest.raises(lt.InvalidInputError):
        lt.DrafterChain(*drafters)


@pytest.mark.parametrize(
    "options",
    [
        {"n_longest": 0},
        {"n_longest": 65},
        {"n_longest": 2.0},
        {"n_shortest": 0},
        {"n_longest": 2, "n_shortest": 3},
        {"n_max": 0},
        {"n_max": 1025},
        {"n_max": "Auto"},
        {"n_max": True},
        {"n_min": -1},
        {"n_min": None},
        {"n_max": 2, "n_min": 3},
        {"n_min": 9},
        {"n_max": "auto", "n_min": 9},
    ],
    ids=str,
)
def test_wrong_options_of_ngrams_raise(options: dict[str, Any]) -> None:
    with pytest.raises(lt.InvalidInputError):
        lt.NGramDrafter(**options)


@pytest.mark.parametrize(("function", "n_max"), [(5, 4), (None, 4), (len, 0), (len, 1.5), (len, "all")])
def test_wrong_functions_raise(function: Any, n_max: Any) -> None:
    with pytest.raises(lt.InvalidInputError):
        lt.CallableDrafter(function, n_max=n_max)


@pytest.mark.parametrize(
    "make",
    [
        lt.NGramDrafter,
        lambda: lt.SuffixDrafter(max_spec_factor=2),
        lambda: lt.CallableDrafter(PromptLookup()),
    ],
    ids=["n-gram", "suffix", "function"],
)
def test_wrong_use_raises_and_changes_nothing(make: Any) -> None:
    drafter = make()
    text = [5, 6, 7, 8, 5, 6]
    drafter.process(lt.Batch.of(text[:-1]))

    def process(*entries: tuple[int, int, int]) -> None:
        batch = lt.Batch()
        for entry in entries:
            batch.add(*entry)
        drafter.process(batch)

    wide = lt.Batch(n_embd=4)
    wide.add_embedding(np.zeros(4, np.float32), 5)
    calls: list[Callable[[], Any]] = [
        lambda: process((6, 7, 0)),
        lambda: process((6, 1, 1)),
        lambda: process((6, 5, 0), (6, 7, 0)),
        lambda: process((6, 5, 0), (6, 1, 1)),
        lambda: process((6, 5, 0), (7, 5, 0)),
        lambda: drafter.process(wide),
        lambda: drafter.process([5]),
        lambda: drafter.draft({0: lt.DraftRequest(6, 4, 4)}),
        lambda: drafter.draft({0: lt.DraftRequest(6, 6, 4)}),
        lambda: drafter.draft({0: lt.DraftRequest(6, -1, 4)}),
        lambda: drafter.draft({1: lt.DraftRequest(6, 5, 4)}),
        lambda: drafter.accept(0, 5),
        lambda: drafter.accept(0, -1),
        lambda: drafter.accept(1, 0),
    ]
    for number, call in enumerate(calls):
        with pytest.raises(lt.InvalidInputError):
            call()
        assert tokens_of(drafter.draft({0: request(text, 3)})) == [7, 8, 5], f"after call {number}"
