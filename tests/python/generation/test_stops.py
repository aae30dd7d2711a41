"""Ends of a text: stop tokens and strings, its length, the context; inside a draft too."""

from __future__ import annotations

import codecs
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.generation import EXACT, Guessing, Noting, by_hand, is_empty, ragged
from support.tiny import TinyLlama
from support.tiny_models import rigged
from support.tiny_models.rigged import by_token, cycle, simulate, wrong_at

import llamatap as lt
from llamatap.generation.text_stream import TextStream

F = cycle()
END = 2
#: a is token 5; the text goes on through the alphabet.
LETTERS = string.ascii_lowercase + string.ascii_uppercase
#: z (30) is followed by </s>, and that by token 3.
ENDING = cycle()
ENDING[30] = END


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, lt.Model]]:
    folder = tmp_path_factory.mktemp("stops")
    with (
        lt.Model(rigged.write_rigged_model(folder / "f.gguf", F)) as endless,
        lt.Model(rigged.write_rigged_model(folder / "e.gguf", ENDING)) as ending,
    ):
        yield {"endless": endless, "ending": ending}


def drafting(table: Sequence[int], length: int) -> lt.Drafter | None:
    """Drafts what follows by the table, </s> and what comes after it included."""
    if length == 0:
        return None
    return lt.CallableDrafter(lambda tokens: by_token(table)(tokens.tolist(), length), n_max=length)


def one(model: lt.Model, prompt: Any, drafter: Any = None, **options: Any) -> lt.Generation:
    """Streamed and not streamed."""
    found: lt.Generation
    with model.context(n_ctx=512, **EXACT) as context:
        (found,) = lt.generate(context, prompt, drafter, **options)
        events = list(lt.generate(context, prompt, drafter, stream=True, **options))
        assert is_empty(context)
    assert [event.token for event in events] == found.tokens.tolist()
    assert "".join(event.text for event in events) == found.text
    assert [event.final is None for event in events] == [True] * (len(events) - 1) + [False]
    assert events[-1].final is not None
    assert events[-1].final.finish_reason == found.finish_reason
    return found


@pytest.mark.sampled(3)
@pytest.mark.parametrize("length", range(8))
def test_the_end_of_generation_ends_a_text_inside_of_a_draft(
    length: int, models: dict[str, lt.Model]
) -> None:
    """All drafted tokens would stand, those after </s> too. https://github.com/ggml-org/llama.cpp/issues/28049"""
    model = models["ending"]
    assert model.is_end_of_generation(END)
    for first in range(15, 30):
        prompt = [1, first]
        expected = [*range(first + 1, 31), END]
        found = one(model, prompt, drafting(ENDING, length), max_tokens=40)
        assert found.tokens.tolist() == expected
        assert found.text == model.detokenize(expected[:-1])
        assert found.finish_reason == "stop"
        # The rounds of a text that goes on, except for tokens after </s> in the last one.
        whole = simulate(ENDING, by_token(ENDING), prompt, length, 40)
        given = accepted = drafted = rounds = 0
        for round in whole.rounds:
            if 1 + given >= len(expected):
                break
            left = len(expected) - 1 - given
            stands = min(round.n_accepted, left)
            # Whether drafted tokens after the end would have been accepted is unknown.
            tried = stands if round.n_accepted >= left else len(round.drafted)
            given += len(round.emitted)
            accepted, drafted, rounds = accepted + stands, drafted + tried, rounds + 1
        stats = found.stats
        assert (stats.rounds, stats.drafted, stats.accepted) == (rounds, drafted, accepted)
        assert stats.accepted_at == stats.drafted_at
        assert sum(stats.accepted_at) == accepted
        assert stats.tokens == len(expected)


@pytest.mark.parametrize("length", [0, 4])
def test_the_end_of_generation_can_be_ignored(length: int, models: dict[str, lt.Model]) -> None:
    found = one(models["ending"], [1, 28], drafting(ENDING, length), max_tokens=7, ignore_eos=True)
    assert found.tokens.tolist() == [29, 30, END, 3, 4, 5, 6]
    assert found.finish_reason == "length"
    # A control token has no text; 3 and 4 are a line break and a space.
    assert found.text == "yz\n ab"


@pytest.mark.slow
@pytest.mark.parametrize("length", [0, 1, 3, 5])
def test_stop_tokens(length: int, models: dict[str, lt.Model]) -> None:
    """At any place of a draft, and right behind it; they are tokens of the text, but not of what it reads."""
    for end in range(11, 25):
        for stops in ([end], [end, 40], {end + 1, end}, np.array([end, end])):
            found = one(models["endless"], [1, 9], drafting(F, length), max_tokens=40, stop_tokens=stops)
            assert found.tokens.tolist() == list(range(10, end + 1))
            assert found.text == LETTERS[5 : end - 5]
            assert found.finish_reason == "stop"
    both = one(models["ending"], [1, 28], drafting(ENDING, length), max_tokens=9, stop_tokens=[4])
    assert both.tokens.tolist() == [29, 30, END]
    later = one(
        models["ending"], [1, 28], drafting(ENDING, length), max_tokens=9, stop_tokens=[4], ignore_eos=True
    )
    assert later.tokens.tolist() == [29, 30, END, 3, 4]
    # A stop at the end of the prompt does not count.
    assert len(one(models["endless"], [1, 9], max_tokens=5, stop_tokens=[9]).tokens) == 5


STRINGS: list[tuple[Any, str, str]] = [
    # stop, text, what the tokens read together; all after "abc"
    ("h", "defg", "defgh"),
    ("ghi", "def", "defghi"),
    (["ghi"], "def", "defghi"),
    (["ghi", "gh"], "def", "defgh"),
    (["fgh", "h"], "de", "defgh"),
    (["h", "fgh"], "de", "defgh"),
    (["efghijkl", "gh"], "def", "defgh"),
    (["efx", "exy", "fgx", "ghij"], "def", "defghij"),
    (["ijx", "hi"], "defg", "defghi"),
    (("d",), "", "d"),
    (["de"], "", "de"),
    (["D"], "defghijklmnopqrstuvwxyzABC", "defghijklmnopqrstuvwxyzABCD"),
    # The stop string lies in the prompt, wholly or by half.
    (["abc"], "defghijklmnopqrstuvwxyzABCDEFG", "defghijklmnopqrstuvwxyzABCDEFG"),
    (["cd"], "defghijklmnopqrstuvwxyzABCDEFG", "defghijklmnopqrstuvwxyzABCDEFG"),
    # A stop string that is incomplete when the text ends is given out.
    (["FGH"], "defghijklmnopqrstuvwxyzABCDEFG", "defghijklmnopqrstuvwxyzABCDEFG"),
    (["defghijklmnopqrstuvwxyzABCDEFG."], LETTERS[3:33], LETTERS[3:33]),
]


@pytest.mark.parametrize("length", [0, 1, 2, 7])
@pytest.mark.parametrize(("stop", "text", "read"), STRINGS)
def test_stop_strings(stop: Any, text: str, read: str, length: int, models: dict[str, lt.Model]) -> None:
    model = models["endless"]
    found = one(model, "abc", drafting(F, length), max_tokens=30, stop=stop)
    assert found.text == text
    assert model.detokenize(found.tokens) == read
    assert found.finish_reason == ("length" if len(read) == 30 else "stop")
    assert found.stats.tokens == len(read)
    # Drafted tokens after the stop are not counted.
    stats = found.stats
    assert 1 + stats.rounds + stats.accepted - len(read) in (0, 1)
    assert stats.accepted <= len(read) - 1


def test_text_that_may_be_a_stop_is_held_back(models: dict[str, lt.Model]) -> None:
    with models["endless"].context(n_ctx=256, **EXACT) as context:
        events = lt.generate(context, "abc", max_tokens=8, stop=["efx", "hijklm"], stream=True)
        assert [event.text for event in events] == ["d", "", "", "efg", "", "", "", "hijk"]
        events = lt.generate(context, "abc", max_tokens=8, stop=["fgh"], stream=True)
        assert [event.text for event in events] == ["d", "e", "", "", ""]


def test_stops_of_one_prompt_leave_the_others_alone(models: dict[str, lt.Model]) -> None:
    with models["endless"].context(n_ctx=512, n_seq_max=3, **EXACT) as context:
        for length in (0, 3):
            found = list(
                lt.generate(
                    context,
                    ["abc", "ghi", "k", "a"],
                    drafting(F, length),
                    max_tokens=9,
                    stop="fg",
                    stop_tokens=[5 + LETTERS.index("m")],
                )
            )
            assert [generation.text for generation in found] == ["de", "jkl", "l", "bcde"]
            assert [len(generation.tokens) for generation in found] == [4, 4, 2, 6]


@pytest.mark.parametrize("length", [0, 3])
def test_one_token(length: int, models: dict[str, lt.Model]) -> None:
    """The token comes from the prompt's pass: there is no round, and nothing is drafted."""
    found = one(models["ending"], [1, 9], drafting(ENDING, length), max_tokens=1)
    assert (found.tokens.tolist(), found.finish_reason, found.text) == ([10], "length", "f")
    ended = one(models["ending"], [1, 30], drafting(ENDING, length), max_tokens=1)
    assert (ended.tokens.tolist(), ended.finish_reason, ended.text) == ([END], "stop", "")
    for generation in (found, ended):
        assert (generation.stats.rounds, generation.stats.drafted) == (0, 0)
        assert np.isnan(generation.stats.tokens_per_round)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kv_unified", [True, False])
@pytest.mark.parametrize("kind", ["none", "right", "half", "wrong"])
def test_a_full_context_ends_a_text_where_it_is(
    kind: str, kv_unified: bool, tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    """256 places, and a token more, which takes none; the same as of a context with more room."""
    prompts = ragged(rng, tiny_model.n_vocab, (250, 256, 240, 255, 100))
    longer = [by_hand(tiny_model, prompt, 30, options={"n_ctx": 512}) for prompt in prompts]
    drafter = Guessing(
        tiny_model.n_vocab,
        [[*prompt, *tokens] for prompt, tokens in zip(prompts, longer, strict=True)],
        wrong={"right": 0.0, "half": 0.5, "wrong": 1.0}.get(kind, 0),
        longest=8,
    )
    options: dict[str, Any] = {"n_ctx": 256 if kv_unified else 512, "n_seq_max": 2, "kv_unified": kv_unified}
    with tiny_model.context(**options, **EXACT) as context:
        found = list(
            lt.generate(context, prompts, None if kind == "none" else drafter, max_tokens=30, ignore_eos=True)
        )
        assert is_empty(context)
    for prompt, tokens, generation in zip(prompts, longer, found, strict=True):
        count = min(30, 256 - len(prompt) + 1)
        assert generation.tokens.tolist() == tokens[:count]
        assert generation.finish_reason == ("length" if count == 30 else "context")
        assert generation.text == tiny_model.detokenize(tokens[:count], skip_special=True)


def test_the_last_token_that_fits_may_be_a_stop_or_the_last_asked_for(models: dict[str, lt.Model]) -> None:
    prompt = [1, *[40] * 240, 9]
    with models["endless"].context(n_ctx=256, **EXACT) as context:
        for length in (0, 3, 30):
            drafter = drafting(F, length)
            (found,) = lt.generate(context, prompt, drafter, max_tokens=99)
            assert (len(found.tokens), found.finish_reason) == (15, "context")
            (found,) = lt.generate(context, prompt, drafter, max_tokens=15)
            assert (len(found.tokens), found.finish_reason) == (15, "length")
            (found,) = lt.generate(context, prompt, drafter, max_tokens=99, stop_tokens=[24])
            assert (len(found.tokens), found.finish_reason) == (15, "stop")
            (found,) = lt.generate(context, prompt, drafter, max_tokens=99, stop="uvw")
            assert (found.text, found.finish_reason) == (LETTERS[5:20], "context")


def test_a_prompt_longer_than_the_context_raises_before_anything(models: dict[str, lt.Model]) -> None:
    """The error names the prompt among several; nothing is decoded, and no drafter is told."""
    for kv_unified in (True, False):
        options: dict[str, Any] = {"n_seq_max": 2, "kv_unified": kv_unified}
        options["n_ctx"] = 256 if kv_unified else 512
        with models["endless"].context(**options, **EXACT) as context:
            noting = Noting()
            prompts = [[1, 9], [1, 5] * 129, [1, 9]]
            for stream in (True, False):
                with pytest.raises(lt.ContextFullError, match=r"prompt 1 has 258 .* room for 256"):
                    lt.generate(context, prompts, noting, max_tokens=3, stream=stream)
            assert noting.batches == []
            assert is_empty(context)
            found = list(lt.generate(context, [[1, 5] * 128, [1, 9]], noting, max_tokens=3))
            assert [generation.tokens.tolist() for generation in found] == [[6], [10, 11, 12]]
            assert [generation.finish_reason for generation in found] == ["context", "length"]


def test_a_prompt_longer_than_the_model_was_trained_for_wants_a_context(tmp_path: Path) -> None:
    """As lt.extract does. A context of the caller's is used as it is."""
    with lt.Model(TinyLlama(n_ctx=300).write(tmp_path / "short.gguf")) as model:
        expected = r"prompt 1 has 301 tokens; .* trained for 300: cut .* a context of more than 301"
        with pytest.raises(lt.ContextFullError, match=expected):
            lt.generate(model, [[5], [5] * 301], max_tokens=3)
        with model.context(n_ctx=304) as context:
            (found,) = lt.generate(context, [5] * 301, max_tokens=3)
        assert len(found.tokens) == 3
        (found,) = lt.generate(model, [5] * 300, max_tokens=3)
        assert (len(found.tokens), found.finish_reason) == (1, "context")


@pytest.mark.fuzz
@settings(derandomize=True, deadline=None, max_examples=300, database=None)
@given(
    pieces=st.lists(st.binary(max_size=3) | st.sampled_from([b"a", b"b", b"ab", b"\xc3", b"\xa9"])),
    stops=st.lists(st.text("ab\N{LATIN SMALL LETTER E WITH ACUTE}", min_size=1, max_size=4), max_size=3),
)
def test_text_streams_are_their_bytes_up_to_the_first_stop(pieces: list[bytes], stops: list[str]) -> None:
    """Against bytes that are decoded in one piece, after each token. What is held back may become a stop."""
    stream = TextStream(pieces.__getitem__, stops)
    given = ""
    for i in range(len(pieces)):
        given += stream.push(i)
        # An incomplete character at the end is left out.
        known = codecs.getincrementaldecoder("utf-8")("replace").decode(b"".join(pieces[: i + 1]))
        found = [known.find(stop) for stop in stops if stop in known]
        assert stream.stopped == bool(found)
        if found:
            assert given == known[: min(found)] == stream.text
            assert stream.push(i) == stream.finish() == ""
            return
        assert known.startswith(given)
        held = known[len(given) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)
    given += stream.finish()
    whole = b"".join(pieces).decode(errors="replace")
    found = [whole.find(stop) for stop in stops if stop in whole]
    assert given == whole[: min(found, default=None)] == stream.text


def test_drafts_that_are_wrong_stop_where_plain_text_does(models: dict[str, lt.Model]) -> None:
    """A stop in a rejected draft stops nothing."""
    wrong = wrong_at(F, range(64), by=1)
    for stop in ({"stop": "hi"}, {"stop_tokens": [13]}):
        plain = one(models["endless"], "abc", max_tokens=20, **stop)
        drafted = one(models["endless"], "abc", drafting(wrong, 4), max_tokens=20, **stop)
        assert drafted.tokens.tolist() == plain.tokens.tolist()
        assert drafted.text == plain.text
        assert drafted.stats.accepted == 0
    said = lt.CallableDrafter(lambda tokens: [END, 13, 13], n_max=3)
    assert one(models["endless"], "abc", said, max_tokens=5).text == "defgh"


def test_a_file_without_a_tokenizer_has_tokens_and_no_text(tmp_path: Path, tiny: Any) -> None:
    with lt.Model(tiny.write(tmp_path / "bare.gguf", tokenizer=False)) as model:
        found = one(model, [5, 6, 7], max_tokens=8, stop=["a"])
        assert found.text == ""
        assert found.finish_reason == "length"
        assert found.tokens.tolist() == by_hand(model, [5, 6, 7], 8)
        with pytest.raises(lt.UnsupportedError):
            lt.generate(model, "abc")
