"""A server in its own process: many clients, dying clients, SIGTERM under load."""

from __future__ import annotations

import base64
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support import drafting
from support.numerics import EXACT, relative
from support.servers import FLAGS, metric, served, server_process

import llamatap as lt
from llamatap.__main__ import main
from llamatap._native import _core
from llamatap.layers import translate


def resident(process: subprocess.Popen[str]) -> int:
    """Resident memory of a process in MiB."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+)", status)
    assert found is not None
    return int(found[1]) // 1024


@pytest.fixture(scope="module")
def address(tiny_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with served("--model", f"tiny={tiny_path}", *FLAGS) as found:
        yield found


@pytest.mark.slow
def test_many_clients_get_what_is_theirs(
    address: tuple[subprocess.Popen[str], str], tiny_model: lt.Model, rng: np.random.Generator
) -> None:
    process, url = address
    n_layer = tiny_model.n_layer
    prompts = [
        rng.integers(3, tiny_model.n_vocab, length).tolist() for length in rng.integers(1, 150, 100).tolist()
    ]
    # In-process, one by one, all layers.
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        expected = [extractor(one, [*range(n_layer + 1), "norm"]) for one in prompts]

    def ask(client: httpx.Client, number: int) -> None:
        random = np.random.default_rng(number)
        index = int(random.integers(len(prompts)))
        layers = random.choice(range(-n_layer - 1, n_layer + 1), random.integers(1, 4)).tolist()
        body: dict[str, Any] = {"model": "tiny", "input": prompts[index], "encoding_format": "base64"}
        flat = len(layers) == 1 and bool(random.integers(2))
        body |= {"layer": layers[0]} if flat else {"layers": layers}
        answer = client.post("/v1/hidden_states", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        raw = np.frombuffer(base64.b64decode(found["hidden_states"]), np.float32).reshape(found["shape"])
        own = translate(layers, source="transformers", n_layer=n_layer)
        wanted = expected[index].select(own).array
        assert raw.shape == (wanted[:, 0] if flat else wanted).shape
        assert relative(raw.reshape(wanted.shape), wanted) < 1e-5

    def client(first: int, count: int) -> int:
        with httpx.Client(base_url=url, timeout=120) as http:
            for number in range(first, first + count):
                ask(http, number)
        return count

    n_clients = 32
    before = metric(url, 'llamatap_requests_total{path="/v1/hidden_states",status="200"}')
    with ThreadPoolExecutor(n_clients) as pool:
        warm = sum(pool.map(client, range(0, 10_000, 10_000 // n_clients), [8] * n_clients))
        settled = resident(process)
        done = sum(pool.map(client, range(20_000, 10**6, 30_000), [55] * n_clients))
    assert warm + done >= 2_000
    after = metric(url, 'llamatap_requests_total{path="/v1/hidden_states",status="200"}')
    assert after - before == warm + done
    # AddressSanitizer keeps what was freed.
    if not _core.build_info()["sanitize"]:
        assert resident(process) - settled < 40
    assert metric(url, 'llamatap_queue_prompts{model="tiny"}') == 0


CLIENT = """
import sys, httpx
httpx.post(sys.argv[1] + "/v1/" + sys.argv[2], json=eval(sys.argv[3]), timeout=60)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("hidden_states", "'input': [[5] * 2000] * 200, 'max_length': 2000, 'pooling': 'last'"),
        ("completions", "'prompt': [[5, 6]] * 128, 'max_tokens': 2000, 'ignore_eos': True"),
        ("completions", "'prompt': [[5, 6]] * 128, 'max_tokens': 2000, 'ignore_eos': True, 'stream': True"),
    ],
)
def test_a_client_that_is_killed_frees_its_place(
    address: tuple[subprocess.Popen[str], str], path: str, body: str
) -> None:
    _, url = address

    def computed() -> float:
        kinds = ("extracted", "generated")
        return sum(metric(url, f'llamatap_tokens_total{{kind="{one}",model="tiny"}}') for one in kinds)

    before = computed()
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, url, path, f"{{'model': 'tiny', {body}}}"], stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while metric(url, 'llamatap_queue_prompts{model="tiny"}') == 0:
        assert time.monotonic() < deadline
        assert client.poll() is None
    client.kill()
    client.wait()
    deadline = time.monotonic() + 10
    while metric(url, 'llamatap_queue_prompts{model="tiny"}') > 0:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    # Most of the 256,000 or more tokens that it asked for were not computed.
    assert computed() - before < 100_000
    assert httpx.post(f"{url}/v1/hidden_states", json={"model": "tiny", "input": "a"}).status_code == 200


@pytest.mark.slow
def test_sigterm_answers_what_was_accepted(tiny_path: Path) -> None:
    # Under the sanitizers the load is one of minutes.
    flags = (*FLAGS, "--drain", "300")
    with served("--model", f"tiny={tiny_path}", *flags) as (process, url), ThreadPoolExecutor(12) as pool:
        states = {"model": "tiny", "input": [[5] * 700] * 20, "max_length": 700, "pooling": "last"}
        text = {"model": "tiny", "prompt": [5, 6], "max_tokens": 200, "ignore_eos": True}
        asked = [
            pool.submit(httpx.post, f"{url}/v1/hidden_states", json=states, timeout=300) for _ in range(6)
        ]
        asked += [pool.submit(httpx.post, f"{url}/v1/completions", json=text, timeout=300) for _ in range(6)]
        deadline = time.monotonic() + 30
        # All are admitted: some are computed, some wait.
        while metric(url, 'llamatap_queue_prompts{model="tiny"}') < 20:
            assert time.monotonic() < deadline
            if all(one.done() for one in asked):
                pytest.fail("the load was over before it could be seen")
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGTERM)
        answers = [one.result() for one in asked]
        assert [one.status_code for one in answers] == [200] * 12
        assert all(len(one.json()["data"]) == 20 for one in answers[:6])
        assert all(one.json()["usage"]["completion_tokens"] == 200 for one in answers[6:])
        assert process.wait(20) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.slow
def test_two_signals_end_it_at_once(tiny_path: Path) -> None:
    with served("--model", f"tiny={tiny_path}", *FLAGS) as (process, url), ThreadPoolExecutor(4) as pool:
        text = {"model": "tiny", "prompt": [[5, 6]] * 64, "max_tokens": 2000, "ignore_eos": True}
        asked = [pool.submit(httpx.post, f"{url}/v1/completions", json=text, timeout=60) for _ in range(4)]
        deadline = time.monotonic() + 30
        while metric(url, 'llamatap_queue_prompts{model="tiny"}') < 200:
            assert time.monotonic() < deadline
        os.kill(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert process.poll() is None
        os.kill(process.pid, signal.SIGINT)
        for one in asked:
            answer = one.result()
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "shutting_down"
        process.wait(20)


def refused(*arguments: str | int | Path) -> str:
    """The error message of a server that does not start."""
    command = [sys.executable, "-m", "llamatap", "serve", "--port", "0", *map(str, arguments)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert found.returncode == 1, found.stderr
    assert found.stderr.count("\n") == 1
    return found.stderr


def test_a_port_in_use_is_told_before_models_are_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["serve", "--model", "missing.gguf", "--port", port]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"llamatap: --port {port} of 127.0.0.1 is in use; choose another")
    assert error.count("\n") == 1
    assert main(["serve", "--model", "missing.gguf", "--host", "127.0.0.1", "--port", port]) == 1
    assert "missing.gguf" in capsys.readouterr().err
    assert main(["serve", "--model", "missing.gguf", "--host", "192.0.2.1", "--insecure"]) == 1
    assert "--host 192.0.2.1 --port 8000: " in capsys.readouterr().err


@pytest.mark.slow
def test_addresses_that_others_reach_need_a_key(tiny_path: Path) -> None:
    message = refused("--model", tiny_path, "--host", "0.0.0.0")
    assert "--api-key" in message
    assert "--insecure" in message
    with served("--model", f"tiny={tiny_path}", "--host", "0.0.0.0", "--api-key", "k") as (_, url):
        assert httpx.get(url.replace("0.0.0.0", "127.0.0.1") + "/v1/models").status_code == 401
    with served("--model", f"tiny={tiny_path}", "--host", "0.0.0.0", "--insecure") as (_, url):
        assert httpx.get(url.replace("0.0.0.0", "127.0.0.1") + "/v1/models").status_code == 200


@pytest.mark.slow
def test_what_cannot_be_served_is_said_in_a_line(tiny_path: Path, tmp_path: Path) -> None:
    assert "no such file" in refused("--model", tmp_path / "none.gguf")
    assert "twice" in refused("--model", f"a={tiny_path}", "--model", f"a={tiny_path}")
    assert "for which model" in refused(
        "--model", f"a={tiny_path}", "--model", f"b={tiny_path}", "--drafter", "ngram"
    )
    assert "no model 'c'" in refused("--model", f"a={tiny_path}", "--drafter", "c=ngram")
    assert "--hidden-states-path" in refused("--model", tiny_path, "--verifier-layers", "1,2")
    assert "the largest n_ctx that fits" in refused("--model", tiny_path, "--n-ctx", 2**28)
    assert "number or auto" in refused("--model", tiny_path, "--drafter", "ngram", "--n-max", "many")
    drafter = drafting.PAIRS["eagle3"](tmp_path).draft
    assert "eagle3: this is no language model of its own" in refused("--model", f"x={drafter}")
    (tmp_path / "file").write_text("")
    assert "file" in refused("--model", tiny_path, "--hidden-states-path", tmp_path / "file")


@pytest.mark.slow
def test_the_start_says_what_is_served_and_nothing_else(tiny_path: Path, tmp_path: Path) -> None:
    preset = tmp_path / "own.toml"
    preset.write_text('name = "own"\n[states]\nconvention = "llamatap"\nlayers = [1]\n')
    flags = ("--model", f"tiny={tiny_path}", "--drafter", "ngram", "--preset", preset, *FLAGS)
    with server_process(*flags) as server:
        model, presets, address = server.said.splitlines()
        for part in (
            "tiny: llama, F32",
            "layers 0..4 of 64 numbers",
            "8 texts",
            "2048 tokens",
            "drafter ngram",
        ):
            assert part in model
        assert "presets: " in presets
        assert "own" in presets
        assert server.url in address
        # The engine warns where a context is made that is shorter than what the model was trained with.
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert "llama_" not in server.said
    with server_process(*flags, "--verbose") as server:
        httpx.post(f"{server.url}/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
    assert "llama_" in server.said
