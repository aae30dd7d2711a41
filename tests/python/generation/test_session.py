"""Sessions: a prompt added at any time, with its own options, gives what generate gives for it alone."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT, Guessing, by_hand, is_empty
from support.numerics import relative
from support.sessions import CUT, Workload, check, drafter_of, finals
from support.tiny_models import rigged
from support.tiny_models.rigged import cycle

import llamatap as lt
from llamatap._engine_context import engine_of
from llamatap.generation.api import generate


@pytest.mark.sampled(8)
@pytest.mark.parametrize("n_seq_max", [1, 3])
@pytest.mark.parametrize("kind", ["none", "ngram", "guessing", "model", "eagle3"])
def test_prompts_that_come_at_any_time_are_those_alone(kind: str, n_seq_max: int, workload: Workload) -> None:
    rng = np.random.default_rng(n_seq_max)
    with workload.model.context(n_seq_max=n_seq_max, **CUT) as context:
        with lt.Session(context, drafter_of(kind, workload, context)) as session:
            for _ in range(2):
                coming = rng.permutation(len(workload.prompts)).tolist()
                known: dict[int, int] = {}
                events: dict[int, list[lt.Event]] = {}
                while coming or session.pending:
                    for _ in range(min(len(coming), int(rng.integers(0, 3)) if session.pending else 1)):
                        at = coming.pop()
                        index = session.add(workload.prompts[at], **workload.options[at])
                        known[index] = at
                        events[index] = []
                    for event in session.step():
                        events[event.index].append(event)
                assert len(known) == len(workload.prompts)
                for index, at in known.items():
                    *before, last = events[index]
                    assert last.final is not None
                    assert last.final.index == index
                    assert all(event.final is None for event in before)
                    assert [event.token for event in events[index]] == last.final.tokens.tolist()
                    assert "".join(event.text for event in events[index]) == last.final.text
                    check(workload, at, last.final)
                assert session.step() == []
                assert is_empty(context)
        assert engine_of(context).capture is None


def test_texts_are_drafted_for_whoever_is_beside_them(workload: Workload) -> None:
    """Rejection is an option of the request: each draws the tokens that it draws alone."""
    prompts = workload.prompts[:4]
    options: dict[str, Any] = {"ignore_eos": True, "max_tokens": 30, "temperature": 0.9}
    with workload.model.context(n_seq_max=4, **CUT) as context:
        spec = lt.SpeculativeContext(context, workload.other, as_model=True, **EXACT)
        drafter = lt.ModelDrafter(context, spec, n_max=3, temperature=0.8)
        alone = [
            next(lt.generate(context, prompt, drafter, seed=i, rejection=i % 2 == 1, **options))
            for i, prompt in enumerate(prompts)
        ]
        plain = [
            next(lt.generate(context, prompt, seed=i, **options)).tokens.tolist()
            for i, prompt in enumerate(prompts)
        ]
        with lt.Session(context, drafter) as session:
            for i, prompt in enumerate(prompts):
                session.add(prompt, seed=i, rejection=i % 2 == 1, **options)
            found = finals(session)
    for i in range(4):
        assert found[i].tokens.tolist() == alone[i].tokens.tolist()
        assert (found[i].tokens.tolist() == plain[i]) == (i % 2 == 0)
        assert found[i].stats.accepted == alone[i].stats.accepted
    assert all(found[i].stats.accepted > 0 for i in (1, 3))


def test_a_seed_is_drawn_for_each_prompt_that_has_none(workload: Workload) -> None:
    with workload.model.context(n_seq_max=4, **CUT) as context, lt.Session(context) as session:
        for _ in range(4):
            session.add(workload.prompts[0], temperature=1.0, max_tokens=12, ignore_eos=True)
        assert len({tuple(one.tokens.tolist()) for one in finals(session).values()}) == 4


def test_options_that_are_not_given_are_those_of_generate() -> None:
    theirs = inspect.signature(generate).parameters
    for name, one in inspect.signature(lt.Session.add).parameters.items():
        if one.kind is inspect.Parameter.KEYWORD_ONLY:
            assert theirs[name].default == one.default


def test_what_is_pending_waits_and_goes_on(workload: Workload) -> None:
    with workload.model.context(n_seq_max=2, **CUT) as context, lt.Session(context) as session:
        assert session
        assert (session.step(), session.pending, len(session)) == ([], 0, 0)
        for count in (1, 2, 3):
            assert session.add([5, 6], max_tokens=count, ignore_eos=True) == count - 1
            assert session.pending == len(session) == count
        assert repr(session) == "Session(pending=3)"
        pending = []
        while session.pending:
            session.step()
            pending.append(session.pending)
        assert pending == [2, 1, 1, 0]


def test_first_come_first_served_though_a_later_one_would_fit(workload: Workload) -> None:
    with (
        workload.model.context(n_seq_max=3, **{**CUT, "n_ctx": 256}) as context,
        lt.Session(context) as session,
    ):
        first = session.add(workload.prompts[0], max_tokens=150, ignore_eos=True)
        large = session.add(workload.prompts[1], max_tokens=150, ignore_eos=True)
        small = session.add(workload.prompts[6], max_tokens=2, ignore_eos=True)
        order = []
        while session.pending:
            order += [event.index for event in session.step() if event.token >= 0]
        assert order[:150] == [first] * 150
        assert sorted(order[150:154]) == [large, large, small, small]


def test_a_text_may_be_as_long_as_the_context_has_room(workload: Workload) -> None:
    with workload.model.context(**{**CUT, "n_ctx": 256}) as context, lt.Session(context) as session:
        session.add(workload.prompts[0], max_tokens=10_000, ignore_eos=True)
        (found,) = finals(session).values()
    assert found.finish_reason == "context"
    assert len(found.prompt) + len(found.tokens) == 257
    assert found.tokens.tolist() == by_hand(workload.model, workload.prompts[0], 248)


def test_texts_go_on_while_a_long_prompt_enters(workload: Workload) -> None:
    with workload.model.context(n_seq_max=2, **CUT) as context, lt.Session(context) as session:
        short = session.add([5, 6], max_tokens=30, ignore_eos=True)
        session.step()
        long = session.add([7] * 300, max_tokens=1)
        rounds = []
        while session.pending:
            rounds.append([event.index for event in session.step()])
        at = next(i for i, indices in enumerate(rounds) if long in indices)
        assert at == 9  # pieces of 31 of 32
        assert all(indices == [short] for indices in rounds[:at])


def test_a_short_prompt_enters_beside_a_long_one_and_neither_waits_for_ever(workload: Workload) -> None:
    with workload.model.context(n_seq_max=3, **CUT) as context, lt.Session(context) as session:
        long = session.add([7] * 300, max_tokens=1)
        short = session.add([5] * 9, max_tokens=1)
        assert [event.index for event in session.step()] == [short]
        n_rounds = 1
        ended: list[int] = []
        while long not in ended:
            while session.pending < 3:
                session.add([5] * 31, max_tokens=1)
            ended += [event.index for event in session.step()]
            n_rounds += 1
        # In pieces of 16 of 32, but for 23 of the first round.
        assert 10 < n_rounds <= 1 + -(-277 // 16)
        assert len(ended) > 5


def test_prompts_of_a_length_end_as_they_came(workload: Workload) -> None:
    with workload.model.context(n_seq_max=3, **CUT) as context, lt.Session(context) as session:
        for _ in range(3):
            session.add([7] * 64, max_tokens=1)
        rounds = []
        while session.pending:
            rounds.append([event.index for event in session.step()])
    assert rounds == [[], [0], [], [1], [], [2]]


def test_penalties_see_the_prompt(tmp_path: Path) -> None:
    """All of it, unless it is said how much. After 12 the logit of 13 is 8, of all others 0."""
    path = rigged.write_rigged_model(tmp_path / "rigged.gguf", cycle())
    with lt.Model(path) as model, model.context(**CUT) as context, lt.Session(context) as session:
        session.add([1, 13, 20, 12], max_tokens=1, presence_penalty=8.1)
        session.add([1, 13, 20, 12], max_tokens=1, presence_penalty=8.1, penalty_last_n=2)
        found = finals(session)
    assert found[0].tokens[0] not in [13, 20, 12]
    assert found[1].tokens.tolist() == [13]


def test_prompts_from_other_threads_while_a_step_is_going_on(tmp_path: Path) -> None:
    """None is lost, none is served twice, and numbers are unique."""
    path = rigged.write_rigged_model(tmp_path / "rigged.gguf", cycle())
    n_threads, each = 4, 50
    with lt.Model(path) as model, model.context(n_seq_max=8, **CUT) as context:
        with lt.Session(context, lt.NGramDrafter(2, 1)) as session:
            added: list[dict[int, int]] = [{} for _ in range(n_threads)]
            cancelled: list[int] = []
            ready = threading.Barrier(n_threads + 1)

            def adding(n: int) -> None:
                ready.wait()
                for i in range(each):
                    token = 5 + (n * each + i) % 55
                    index = session.add([1, token], max_tokens=4, prompt_states=i % 7 == 0)
                    added[n][index] = token
                    if i % 10 == 9:
                        session.cancel(index)
                        cancelled.append(index)

            threads = [threading.Thread(target=adding, args=[n]) for n in range(n_threads)]
            for thread in threads:
                thread.start()
            ready.wait()
            found: dict[int, lt.Generation] = {}
            while any(thread.is_alive() for thread in threads) or session.pending:
                for event in session.step():
                    if event.final is not None:
                        assert event.index not in found
                        found[event.index] = event.final
            for thread in threads:
                thread.join()
        assert is_empty(context)
    tokens: dict[int, int] = {}
    for one in added:
        assert list(one) == sorted(one)
        tokens |= one
    assert sorted(tokens) == sorted(found) == list(range(n_threads * each))
    for index, token in tokens.items():
        expected = list(range(token + 1, token + 5))
        if index in cancelled:
            assert expected[: len(found[index].tokens)] == found[index].tokens.tolist()
        else:
            assert found[index].tokens.tolist() == expected
            assert found[index].finish_reason == "length"


def of(events: Sequence[lt.Event], index: int) -> list[lt.Event]:
    return [event for event in events if event.index == index]


def test_one_that_waits_is_cancelled(workload: Workload) -> None:
    """A cancelled waiting request gives an event without a token; the others keep their order."""
    with workload.model.context(**CUT) as context, lt.Session(context) as session:
        for at in (0, 5, 6, 11):
            session.add(workload.prompts[at], **workload.options[at])
        session.step()
        session.cancel(1)
        session.cancel(2)
        *events, another = session.step()
        # The round goes on for the in-flight text.
        assert [event.index for event in events] == [1, 2]
        assert (another.index, another.final) == (0, None)
        for event in events:
            assert (event.token, event.text, event.states, event.logprobs) == (-1, "", None, None)
            assert event.final is not None
            assert event.final.finish_reason == "cancelled"
            assert len(event.final.tokens) == 0
            assert event.final.prompt_states is not None
            assert event.final.prompt_states.array.shape == (0, 3 if event.index == 1 else 1, 64)
        assert events[0].final is not None
        assert events[0].final.states is None
        assert events[1].final is not None
        assert events[1].final.states is not None
        assert events[1].final.states.array.shape == (0, 1, 64)
        assert session.pending == 2
        found = finals(session)
        assert list(found) == [0, 3]
        check(workload, 0, found[0])
        check(workload, 11, found[3])
        # Too late for anything.
        for index in range(4):
            session.cancel(index)
        assert session.step() == []


@pytest.mark.parametrize("kind", ["none", "guessing", "eagle3"])
def test_one_under_way_is_cancelled(kind: str, workload: Workload) -> None:
    with workload.model.context(n_seq_max=3, **CUT) as context:
        with lt.Session(context, drafter_of(kind, workload, context)) as session:
            for at in (0, 2, 11):
                session.add(workload.prompts[at], **workload.options[at])
            events: list[lt.Event] = []
            while not (of(events, 1) and of(events, 2)):
                events += session.step()
            session.cancel(1)
            rounds = session.step()
            (*_, last) = of(rounds, 1)
            assert last.final is not None
            assert last.final.finish_reason == "cancelled"
            n = len(last.final.tokens)
            assert 1 <= n < 20
            assert last.final.tokens.tolist() == workload.alone[2].tokens.tolist()[:n]
            assert last.final.states is not None
            assert len(last.final.states) == n
            expected = workload.alone[2].states
            assert expected is not None
            assert relative(last.final.states.array, expected.array[:n]) < 1e-5
            # Cancelling by the event is the same.
            event = of(events, 2)[0]
            event.cancel()
            rounds += session.step()
            (*_, last) = of(rounds, 2)
            assert last.final is not None
            assert last.final.finish_reason == "cancelled"
            # The other one may have ended meanwhile.
            ended = {event.index: event.final for event in rounds if event.final is not None}
            check(workload, 0, (ended | finals(session))[0])
        assert is_empty(context)


def test_one_whose_prompt_enters_is_cancelled(workload: Workload) -> None:
    """States of what was computed of it are there."""
    noting = Guessing(workload.model.n_vocab)
    with workload.model.context(n_seq_max=2, **CUT) as context:
        with lt.Session(context, noting) as session:
            options: dict[str, Any] = {"states": "full", "prompt_states": True, "layers": [1, -1]}
            session.add(workload.prompts[10], **options)
            assert session.step() == session.step() == []
            session.cancel(0)
            (event,) = session.step()
            assert event.token == -1
            assert event.final is not None
            assert (len(event.final.tokens), event.final.text) == (0, "")
            states = event.final.prompt_states
            assert states is not None
            assert states.tokens.tolist() == workload.prompts[10][:64]
            with lt.Extractor(workload.model, **EXACT) as extractor:
                assert relative(states.array, extractor(workload.prompts[10], [1, -1]).array[:64]) < 1e-5
            assert is_empty(context)
            assert noting.texts == {}
            session.add(workload.prompts[0], **workload.options[0])
            check(workload, 0, finals(session)[1])
        assert engine_of(context).owner is None


def test_a_closed_session_gives_everything_back(workload: Workload) -> None:
    """Also with texts under way and others that wait."""
    with workload.model.context(n_seq_max=2, **CUT) as context:
        noting = Guessing(workload.model.n_vocab)
        session = lt.Session(context, noting)
        for at in (0, 2, 4, 5):
            session.add(workload.prompts[at], **workload.options[at])
        session.step()
        session.step()
        assert not is_empty(context)
        session.close()
        session.close()
        assert (session.closed, session.pending, repr(session)) == (True, 0, "Session(closed)")
        session.cancel(0)
        assert noting.texts == {}
        assert is_empty(context)
        assert engine_of(context).owner is None
        (found,) = lt.generate(context, workload.prompts[11], noting, **workload.options[11])
        check(workload, 11, found)
