"""Drafts of co-training: taken between two rounds, on trial, given up, refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.cotraining import F, Files, publish, serving, write_files
from support.generation import EXACT
from support.tiny_models import drafters
from support.tiny_models.rigged import write_rigged_eagle3, wrong_at

import llamatap as lt
from llamatap.train.cotrain import cotrainer as cotrainer_module

NUMBERS = '"n_bytes": 1, "sha256": "", "tokens_per_round": 2, "base_tokens_per_round": 1'


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def test_a_new_draft_comes_between_two_rounds(files: Files, tmp_path: Path) -> None:
    """Texts in flight stay with the old draft, new ones get the new one; all of them are the target's own."""
    with serving(files, tmp_path) as one:
        before = one.generate(8)
        publish(one.folder, 1, files.drafts["right"])
        long = one.add(5, 200)
        for _ in range(10):
            one.session.step()
        one.cotrainer.look()
        assert one.cotrainer.in_use == 0
        for i in range(3):
            one.add(i)
        found = {text.index: text for text in one.finish()}
        assert one.cotrainer.in_use == 1
        old, new = found.pop(long).stats, [text.stats for text in found.values()]
        assert all(stats.accepted == stats.drafted > 0 for stats in new)
        # As before, and to its end.
        assert old.drafted > 150
        shares = [text.stats.accepted / text.stats.drafted for text in before]
        assert 0.3 < old.accepted / old.drafted < 0.9
        assert min(shares) < 0.9
        assert [event["draft"] for event in one.events("swapped")] == [1]
        side = one.folder.serving_side()
        assert side is not None
        assert (side.in_use, side.before) == (1, 0)
        one.generate(12)
        one.cotrainer.look()
        assert [event["draft"] for event in one.events("kept")] == [1]
        assert one.folder.refused() == set()


def test_it_goes_back_when_tokens_per_round_fall(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path, "right") as one:
        one.generate(8)
        publish(one.folder, 1, files.drafts["wrong"])
        one.cotrainer.look()
        one.generate(1, 8)
        assert one.cotrainer.in_use == 1
        # Two rounds of a trial of 20 decide nothing.
        assert one.cotrainer.trial is not None
        one.generate(4)
        one.cotrainer.look()
        found = one.generate(4)
        assert one.cotrainer.in_use == 0
        assert all(text.stats.accepted == text.stats.drafted > 0 for text in found)
        (event,) = one.events("went back")
        assert (event["draft"], event["to"], event["tokens_per_round"]) == (1, 0, 1.0)
        assert event["before"] > 2.5
        assert one.folder.refused() == {1}
        # Neither that one again, nor one that was trained from it.
        publish(one.folder, 2, files.drafts["wrong"], base=1)
        one.generate(12)
        one.cotrainer.look()
        one.generate(4)
        assert one.cotrainer.in_use == 0
        publish(one.folder, 3, files.drafts["right"], base=0)
        one.cotrainer.look()
        one.generate(4)
        assert one.cotrainer.in_use == 3


def test_a_draft_is_as_good_as_itself(files: Files, tmp_path: Path) -> None:
    """Although it begins with the first rounds of many texts, which give the fewest tokens."""
    late = write_rigged_eagle3(tmp_path / "late.gguf", F, wrong_at(F, range(3, 20)))
    late_files = Files(files.target, {"late": late})
    with serving(late_files, tmp_path / "f", "late", n_seq_max=16, trial_rounds=100) as one:

        def add(n: int) -> None:
            for _ in range(n):
                one.session.add([63, 3], max_tokens=56, ignore_eos=True)

        add(16)
        one.finish()
        publish(one.folder, 1, late)
        one.cotrainer.look()
        add(16)
        for _ in range(5):
            one.session.step()
            one.cotrainer.look()
        assert one.cotrainer.in_use == 1
        one.finish()
        one.cotrainer.look()
        (event,) = one.events("kept", "went back")
        assert event["event"] == "kept"


def test_two_draft_contexts_at_most(files: Files, tmp_path: Path) -> None:
    """A text that outlives two drafts goes on without."""
    with serving(files, tmp_path) as one:
        one.generate(8)
        long = one.add(5, 400)
        for _ in range(4):
            one.session.step()
        first = one.drafter.spec
        for number in (1, 2):
            assert not first.closed
            publish(one.folder, number, files.drafts["right"], base=number - 1)
            one.cotrainer.look()
            for i in range(3):
                one.add(i)
            while one.session.pending > 1:
                one.session.step()
            assert one.cotrainer.in_use == number
            for _ in range(3):
                for i in range(3):
                    one.add(i)
                while one.session.pending > 1:
                    one.session.step()
            one.cotrainer.look()
        assert first.closed
        (text,) = one.finish()
        assert text.index == long
        assert 0 < text.stats.drafted < 300
        assert len(one.events("swapped")) == 2


def truncated(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes()[:-100])


def no_gguf(source: Path, target: Path) -> None:
    target.write_bytes(b"not GGUF")


@pytest.mark.parametrize("spoil", [truncated, no_gguf])
@pytest.mark.parametrize("when", ["before it is published", "afterwards"])
def test_a_broken_file_is_refused(
    spoil: Callable[[Path, Path], None], when: str, files: Files, tmp_path: Path
) -> None:
    with serving(files, tmp_path) as one:
        one.generate(8)
        path = one.folder.draft(1)
        if when == "afterwards":
            publish(one.folder, 1, files.drafts["right"])
            spoil(files.drafts["right"], path)
        else:
            spoil(files.drafts["right"], path)
            one.folder.publish(1, 0, 2.0, 1.5)
        one.cotrainer.look()
        one.generate(4)
        one.cotrainer.look()
        assert one.cotrainer.in_use == 0
        (event,) = one.events("refused")
        assert event["draft"] == 1
        expected = "not the one that was published" if when == "afterwards" else "1.gguf"
        assert expected in event["reason"]
        assert one.folder.refused() == {1}
        assert one.events("swapped") == []


def test_a_draft_of_another_shape_is_refused(files: Files, tmp_path: Path) -> None:
    wide = drafters.write_eagle3(tmp_path / "wide.gguf")
    for number, (source, reason) in enumerate(
        (
            (files.drafts["other layers"], "on the layers [1, 2, 3], found eagle3 on [0, 1, 2]"),
            (files.target, "expected a draft of kind eagle3"),
            (wide, "vocab"),
        ),
        1,
    ):
        with serving(files, tmp_path / f"f{number}") as one:
            one.generate(8)
            publish(one.folder, 1, source)
            one.cotrainer.look()
            one.generate(4)
            assert one.cotrainer.in_use == 0
            (event,) = one.events("refused")
            assert reason in event["reason"], event
            # And the next one is taken.
            publish(one.folder, 2, files.drafts["right"])
            one.cotrainer.look()
            one.generate(4)
            assert one.cotrainer.in_use == 2


def test_a_draft_that_drafts_nothing_is_given_up(files: Files, tmp_path: Path) -> None:
    """A head of NaN gives no drafts, so it has no rounds with any."""
    with serving(files, tmp_path) as one:
        one.generate(8)
        path = one.folder.draft(1)
        content = bytearray(files.drafts["right"].read_bytes())
        content[-65536:] = np.full(16384, np.nan, np.float32).tobytes()
        path.write_bytes(content)
        one.folder.publish(1, 0, 2.0, 1.5)
        one.cotrainer.look()
        found = [*one.generate(2), *one.generate(4)]
        assert one.cotrainer.in_use == 1
        assert found[-1].stats.drafted == 0
        one.cotrainer.look()
        one.generate(2)
        assert one.cotrainer.in_use == 0
        (event,) = one.events("went back")
        assert event["tokens_per_round"] == 1.0


@pytest.mark.parametrize(
    "content",
    [
        None,
        "null",
        "[" * 100_000,
        '{"number": 1}',
        f'{{"number": 1, "base": [], {NUMBERS}}}',
        f'{{"number": "1", "base": 0, {NUMBERS}}}',
    ],
    ids=["a folder", "null", "nested", "incomplete", "a list", "a string"],
)
def test_a_broken_description_is_refused(content: str | None, files: Files, tmp_path: Path) -> None:
    """And the next draft is taken."""
    with serving(files, tmp_path) as one:
        one.generate(8)
        path = one.folder.drafters / "1.json"
        path.mkdir() if content is None else path.write_text(content)
        one.cotrainer.look()
        (event,) = one.events("refused")
        assert event["draft"] == 1
        assert "1.json is not a file of co-training" in event["reason"]
        publish(one.folder, 2, files.drafts["right"])
        one.cotrainer.look()
        one.generate(4)
        assert one.cotrainer.in_use == 2


def test_a_trial_survives_a_kill(files: Files, tmp_path: Path) -> None:
    """Otherwise a bad draft that was on trial would be kept."""
    with serving(files, tmp_path, "right") as one:
        one.generate(8)
        publish(one.folder, 1, files.drafts["wrong"])
        one.cotrainer.look()
        one.generate(1, 8)
        assert one.cotrainer.trial is not None
        rates = one.cotrainer.trial.rates
    with serving(files, tmp_path, "right") as one:
        assert one.cotrainer.in_use == 1
        trial = one.cotrainer.trial
        assert trial is not None
        assert trial.before == 0
        assert trial.rates == pytest.approx(rates, abs=1e-4)
        one.generate(4)
        one.cotrainer.look()
        one.generate(4)
        assert one.cotrainer.in_use == 0
        assert one.folder.refused() == {1}
    with serving(files, tmp_path, "right") as one:
        assert (one.cotrainer.in_use, one.cotrainer.trial) == (0, None)


def test_a_drafter_that_is_made_while_another_draft_waits(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path) as one, one.cotrainer._model.context(n_ctx=256, **EXACT) as context:
        one.generate(8)
        publish(one.folder, 1, files.drafts["right"])
        one.cotrainer.look()
        other = one.cotrainer.drafter(context, n_max=3)
        one.generate(4)
        list(lt.generate(context, [3, 4], other, max_tokens=5))
        assert (one.drafter.number, other.number, one.cotrainer.in_use) == (1, 1, 1)
        other.close()


def test_nothing_is_loaded_for_closed_drafters(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(files, tmp_path) as one:
        one.generate(8)
        publish(one.folder, 1, files.drafts["right"])
        one.session.close()
        one.drafter.close()

        def no_load(*arguments: Any, **options: Any) -> Any:
            pytest.fail("loaded")

        monkeypatch.setattr(cotrainer_module, "load_draft", no_load)
        one.cotrainer.look()
        assert one.cotrainer.in_use == 0


def test_started_again_it_uses_the_newest_draft(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path) as one:
        one.generate(8)
        publish(one.folder, 1, files.drafts["right"])
        one.cotrainer.look()
        one.generate(4)
        assert one.cotrainer.in_use == 1
    with serving(files, tmp_path) as one:
        assert one.cotrainer.in_use == 1
        assert all(text.stats.accepted == text.stats.drafted for text in one.generate(4))
    one.folder.draft(1).write_bytes(b"")
    with serving(files, tmp_path) as one:
        assert one.cotrainer.in_use == 0
        one.generate(4)


def test_several_contexts_share_the_drafts(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path) as one, one.cotrainer._model.context(n_ctx=256, **EXACT) as context:
        other = one.cotrainer.drafter(context, n_max=3)
        one.generate(8)
        publish(one.folder, 1, files.drafts["right"])
        one.cotrainer.look()
        one.generate(4)
        assert (one.drafter.number, other.number, one.cotrainer.in_use) == (1, 0, 1)
        (text,) = lt.generate(context, [3, 4], other, max_tokens=20, ignore_eos=True)
        assert other.number == 1
        assert text.stats.accepted == text.stats.drafted > 0
        assert len(one.events("swapped")) == 1
        other.close()


def test_a_session_that_is_gone_leaves_its_offer(files: Files, tmp_path: Path) -> None:
    with serving(files, tmp_path) as one:
        one.generate(8)
        publish(one.folder, 1, files.drafts["right"])
        one.cotrainer.look()
        one.session.close()
        one.drafter.close()
        drafter = one.cotrainer.drafter(one.context, n_max=3)
        with lt.Session(one.context, drafter) as one.session:
            one.cotrainer.look()
            one.generate(4)
            assert one.cotrainer.in_use == 1
        drafter.close()
