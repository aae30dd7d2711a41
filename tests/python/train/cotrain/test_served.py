"""Co-training of a served model: ``llamatap serve --cotrain``, killed and started again."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.cotraining import F, Files, publish, write_files
from support.servers import FLAGS, served

from llamatap.__main__ import main
from llamatap.train.cotrain.event_log import read_events
from llamatap.train.cotrain.folder import CoTrainFolder
from llamatap.train.cotrain.sample_writer import sample_numbers


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return write_files(tmp_path_factory.mktemp("files"))


def complete(url: str, first: int, n: int = 1, max_tokens: int = 30) -> None:
    """Complete a prompt, and check that the texts are the target's own."""
    body: dict[str, Any] = {"model": "tiny", "prompt": [first], "n": n, "max_tokens": max_tokens}
    body |= {"ignore_eos": True, "return_token_ids": True, "temperature": 0}
    response = httpx.post(f"{url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    expected = [first]
    while len(expected) < 1 + max_tokens:
        expected.append(F[expected[-1]])
    assert [one["token_ids"] for one in response.json()["choices"]] == [expected[1:]] * n


@pytest.mark.slow
def test_a_killed_server_starts_again(files: Files, tmp_path: Path) -> None:
    folder = CoTrainFolder(tmp_path / "f")
    arguments = ["--model", f"tiny={files.target}", "--drafter", str(files.drafts["fair"]), "--n-max", "3"]
    arguments += ["--cotrain", str(folder.path), "--cotrain-trainer", "off", *FLAGS]
    with served(*arguments) as (process, url):
        for first in range(3, 9):
            complete(url, first)
        deadline = time.monotonic() + 20
        while len(sample_numbers(folder.samples)) < 6:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
        process.wait()
    side = folder.serving_side()
    assert side is not None
    assert not side.closed
    publish(folder, 1, files.drafts["right"])
    with served(*arguments) as (process, url):
        for first in range(3, 63):
            complete(url, first, 8, 200)
            if any(one["event"] == "swapped" for one in read_events(folder.log)):
                break
        else:
            pytest.fail(folder.log.read_text())
        process.terminate()
        process.wait(30)
    side = folder.serving_side()
    assert side is not None
    assert side.closed
    assert side.in_use == 1
    assert sample_numbers(folder.samples)[0] == 0
    assert len(sample_numbers(folder.samples)) >= 14


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ([], "co-training needs a drafter with a file, EAGLE-3 or MTP; found none"),
        (["--drafter", "ngram"], "co-training needs a drafter with a file, EAGLE-3 or MTP; found ngram"),
        (["--drafter", "TARGET"], "co-training is for EAGLE-3 and MTP"),
    ],
)
def test_refusals(
    more: list[str], message: str, files: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(files.target) if one == "TARGET" else one for one in more]
    arguments = ["serve", "--port", "0", "--model", str(files.target), "--cotrain", str(tmp_path / "f")]
    assert main([*arguments, *FLAGS, *given]) == 1
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1
