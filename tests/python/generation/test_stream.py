"""Events: tokens as they come, whole characters, and generations that are left or cancelled."""

from __future__ import annotations

import gc
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.generation import EXACT, SAMPLING, Guessing, by_hand, is_empty, ragged, scripted, seed_of
from support.tiny_models.rigged import by_token, cycle

import llamatap as lt
from llamatap._engine_context import engine_of

F = cycle()
MAX_TOKENS = 25


@pytest.fixture
def prompts(tiny_model: lt.Model, rng: np.random.Generator) -> list[list[int]]:
    return ragged(rng, tiny_model.n_vocab, (12, 40, 3))


def expected_of(model: lt.Model, prompts: list[list[int]], **sampling: Any) -> list[list[int]]:
    return [
        by_hand(model, prompt, MAX_TOKENS, seed=seed_of(5, i), **sampling) for i, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("sampling", SAMPLING)
def test_events_join_to_the_generations(
    sampling: str, drafted: bool, tiny_model: lt.Model, prompts: list[list[int]]
) -> None:
    """Two of three prompts run at once: their events alternate, in order for each."""
    options: dict[str, Any] = {
        "max_tokens": MAX_TOKENS,
        "seed": 5,
        "logprobs": 2,
        "ignore_eos": True,
        **SAMPLING[sampling],
    }
    expected = expected_of(tiny_model, prompts, **SAMPLING[sampling])
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]

    def drafter() -> lt.Drafter | None:
        return Guessing(tiny_model.n_vocab, texts, wrong=0.4) if drafted else None

    with tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        whole = list(lt.generate(context, prompts, drafter(), **options))
        events = list(lt.generate(context, prompts, drafter(), stream=True, **options))
        assert is_empty(context)
    for index, (tokens, generation) in enumerate(zip(expected, whole, strict=True)):
        own = [event for event in events if event.index == index]
        assert [event.token for event in own] == tokens == generation.tokens.tolist()
        assert "".join(event.text for event in own) == generation.text
        assert all(event.states is None for event in own)
        assert [event.logprobs for event in own] == generation.logprobs
        finals = [event.final for event in own if event.final is not None]
        assert len(finals) == 1
        assert own[-1].final is finals[0]
        final = finals[0]
        assert (final.index, final.text, final.finish_reason) == (index, generation.text, "length")
        assert np.array_equal(final.tokens, generation.tokens)
        assert np.array_equal(final.prompt, prompts[index])
        assert final.logprobs == generation.logprobs
        assert (final.stats.rounds, final.stats.drafted) == (
            generation.stats.rounds,
            generation.stats.drafted,
        )
    order = [event.index for event in events]
    assert order[: order.index(2)].count(0) > 3
    assert order[: order.index(2)].count(1) > 3


def test_events_come_as_soon_as_the_tokens_are_known(rigged_model: lt.Model) -> None:
    """A pass of the target for each token without a draft, none for those that come with one."""
    passes: list[int] = []

    def ahead(count: int, tokens: NDArray[np.intc]) -> list[int]:
        return by_token(F)(tokens.tolist(), count) if count else []

    class Counting(lt.CallableDrafter):
        def process(self, batch: lt.Batch, states: lt.States | None = None) -> None:
            passes.append(len(batch))
            super().process(batch, states)

    with rigged_model.context(n_ctx=256, **EXACT) as context:
        for length, expected in (
            (0, [1, 2, 3, 4, 5, 6, 7, 8, 9]),
            (3, [1, 2, 2, 2, 2, 3, 3, 3, 3]),
        ):
            passes.clear()
            drafter = Counting(partial(ahead, length))
            events = lt.generate(context, [1, 9], drafter, max_tokens=9, stream=True)
            assert passes == []
            seen = []
            for event in events:
                seen.append(len(passes))
                assert event.token == 9 + len(seen)
            assert seen == expected


CHARACTERS = "a\N{LATIN SMALL LETTER E WITH ACUTE}\N{LLAMA}\N{CJK UNIFIED IDEOGRAPH-65E5}z"


@pytest.mark.parametrize("length", [0, 1, 3, 20])
def test_characters_are_given_out_whole(length: int, tmp_path: Path) -> None:
    """Tokens are bytes: of one, two, four and three to a character."""
    data = CHARACTERS.encode()
    script = [3, *(3 + byte for byte in data)]
    with lt.Model(scripted(script).write(tmp_path / "script.gguf")) as model:

        def run(max_tokens: int, **options: Any) -> list[lt.Event]:
            drafter = lt.CallableDrafter(
                lambda tokens: [
                    *script[script.index(int(tokens[-1])) + 1 :][:length],
                ],
                n_max=20,
            )
            with model.context(n_ctx=256, **EXACT) as context:
                return list(
                    lt.generate(
                        context,
                        [3],
                        drafter if length else None,
                        max_tokens=max_tokens,
                        stream=True,
                        **options,
                    )
                )

        events = run(len(data))
        assert [event.token - 3 for event in events] == list(data)
        a, e, llama, sun, z = list(CHARACTERS)
        assert [event.text for event in events] == [a, "", e, "", "", "", llama, "", "", sun, z]
        assert events[-1].final is not None
        assert events[-1].final.text == CHARACTERS
        for cut in range(1, len(data)):
            # An incomplete character is given out at the end, decoded as Python would.
            events = run(cut)
            final = events[-1].final
            assert final is not None
            assert final.text == data[:cut].decode(errors="replace")
            assert "".join(event.text for event in events) == final.text
        stopped = run(len(data), stop=[llama + sun])
        assert "".join(event.text for event in stopped) == a + e
        assert len(stopped) == 10
        # A stop string is text, not bytes: half a character is none.
        assert run(len(data), stop="\N{REPLACEMENT CHARACTER}")[-1].text == z


@pytest.mark.sampled(8)
@pytest.mark.parametrize("how", ["close", "throw", "drop", "break"])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stream_that_is_left_frees_the_memory(
    how: str, drafted: bool, tiny_model: lt.Model, prompts: list[list[int]]
) -> None:
    """After any number of events, the context is as new."""
    expected = expected_of(tiny_model, prompts)
    with tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        for count in (0, 1, 2, 3, 30, 60):
            drafter = Guessing(tiny_model.n_vocab) if drafted else None
            stream: Any = lt.generate(
                context, prompts, drafter, max_tokens=MAX_TOKENS, states="full", stream=True
            )
            for _ in range(count):
                event = next(stream)
            if how == "close":
                stream.close()
            elif how == "throw":
                with pytest.raises(RuntimeError, match="enough"):
                    stream.throw(RuntimeError("enough"))
            elif how == "drop":
                gone = weakref.ref(stream)
                del stream
                gc.collect()
                assert gone() is None
            else:
                for _ in stream:
                    break
                # The name `stream` keeps it.
                assert not is_empty(context)
                stream.close()
            assert is_empty(context)
            assert engine_of(context).capture is None
            if drafter is not None:
                assert drafter.texts == {}
            if count:
                event.cancel()  # too late for anything
            found = list(lt.generate(context, prompts, max_tokens=MAX_TOKENS, seed=5, ignore_eos=True))
            assert [one.tokens.tolist() for one in found] == expected


@pytest.mark.sampled(6)
@pytest.mark.parametrize("drafted", [False, True])
@pytest.mark.parametrize("states", [None, "last", "full"])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_one_of_three_is_cancelled(
    which: int, states: Any, drafted: bool, tiny_model: lt.Model, prompts: list[list[int]]
) -> None:
    """The cancelled text ends with the round, and a waiting one takes its place; tokens stay the same."""
    expected = expected_of(tiny_model, prompts)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, expected, strict=True)]
    with tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        drafter = Guessing(tiny_model.n_vocab, texts, wrong=0.4, longest=3) if drafted else None
        finals: dict[int, lt.Generation] = {}
        seen: list[int] = []
        texts_of_events = ""
        for event in lt.generate(
            context,
            prompts,
            drafter,
            max_tokens=MAX_TOKENS,
            seed=5,
            ignore_eos=True,
            states=states,
            stream=True,
        ):
            if event.index == which:
                seen.append(event.token)
                texts_of_events += event.text
                if len(seen) == 5:
                    event.cancel()
            if event.final is not None:
                finals[event.index] = event.final
        assert is_empty(context)
    assert sorted(finals) == [0, 1, 2]
    for index, final in finals.items():
        count = len(final.tokens)
        assert final.tokens.tolist() == expected[index][:count]
        assert final.finish_reason == ("cancelled" if index == which else "length")
        if index != which:
            assert count == MAX_TOKENS
        elif drafted:
            # The rest of a draft of three, and the event that waited for its states.
            assert 5 <= count <= 5 + 3 + (states == "full")
        else:
            assert count == 5 + (states == "full")
        if states is not None:
            assert final.states is not None
            assert final.states.tokens.tolist() == final.tokens.tolist()[-1 if states == "last" else 0 :]
    assert seen == [*finals[which].tokens.tolist(), *([] if states == "full" else [-1])]
    assert texts_of_events == finals[which].text


def test_all_are_cancelled_at_once(rigged_model: lt.Model) -> None:
    with rigged_model.context(n_ctx=512, n_seq_max=3, **EXACT) as context:
        reasons = []
        for event in lt.generate(context, [[1, 9], [1, 20], [1, 30]], max_tokens=50, stream=True):
            event.cancel()
            event.cancel()
            if event.final is not None:
                assert (event.token, len(event.final.tokens)) == (-1, 1)
                reasons.append(event.final.finish_reason)
        assert reasons == ["cancelled"] * 3
        assert is_empty(context)


def test_text_that_is_held_back_comes_with_a_cancelled_end(rigged_model: lt.Model) -> None:
    with rigged_model.context(n_ctx=256, **EXACT) as context:
        text = ""
        for event in lt.generate(context, "abc", max_tokens=50, stop="fghijk", stream=True):
            text += event.text
            if event.token == 5 + "abcdefg".index("g"):
                event.cancel()
        assert event.final is not None
        assert event.final.finish_reason == "cancelled"
        assert text == event.final.text == rigged_model.detokenize(event.final.tokens)
        assert text.startswith("defg")


def test_results_and_events_outlive_the_context(tiny_path: Path) -> None:
    model = lt.Model(tiny_path)
    context = model.context(n_ctx=256, **EXACT)
    events = list(
        lt.generate(context, [5, 6, 7], max_tokens=6, states="full", logprobs=1, ignore_eos=True, stream=True)
    )
    context.close()
    model.close()
    del context, model
    gc.collect()
    final = events[-1].final
    assert final is not None
    assert final.states is not None
    rows = [event.states.array[0] for event in events if event.states is not None]
    assert np.array_equal(np.stack(rows), final.states.array)
    for array in (final.prompt, final.states.array):
        assert not array.flags.writeable
    events[0].cancel()


def test_a_generation_that_is_never_begun_does_nothing(rigged_model: lt.Model) -> None:
    with rigged_model.context(n_ctx=256, **EXACT) as context:
        unused = lt.generate(context, [1, 9], max_tokens=3, states="last")
        (found,) = lt.generate(context, [1, 9], max_tokens=3)
        assert found.tokens.tolist() == [10, 11, 12]
        # It checks the context when it is created, and finds it unchanged when it starts.
        (late,) = unused
        assert late.tokens.tolist() == [10, 11, 12]
        assert is_empty(context)


def test_two_generations_do_not_share_a_context(tiny_model: lt.Model, prompts: list[list[int]]) -> None:
    """The second is refused, whether it was made before the first was begun or after; the first goes on."""
    expected = by_hand(tiny_model, prompts[0], MAX_TOKENS)
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True}
    with tiny_model.context(n_ctx=256, n_seq_max=2, **EXACT) as context:
        late = lt.generate(context, prompts[1], **options)
        first = lt.generate(context, prompts[0], stream=True, **options)
        tokens = [next(first).token for _ in range(2)]
        with pytest.raises(lt.BusyError, match="in use by a generation"):
            lt.generate(context, prompts[1], **options)
        tokens += [next(first).token for _ in range(2)]
        with pytest.raises(lt.Error):
            list(late)
        tokens += [event.token for event in first]
        assert tokens == expected
