"""The trainer of speculators on what is generated, by its own command: `nox -s train`."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.generation import EXACT
from support.numerics import relative
from support.speculators_verifier import write_verifier
from support.tiny import TinyLlama

import llamatap as lt
from llamatap.connectors import Collector, Connector, FileConnector, SharedMemoryConnector
from reference import decoder

pytest.importorskip("torch", reason="needs PyTorch; `nox -s train` installs it")
pytest.importorskip("speculators", reason="needs speculators; `nox -s train` installs it")

#: As vLLM counts: k is what enters block k. H_n is added as the last.
LAYERS = (1, 2, 3)
#: Its trainer wants an accelerator: what takes its place writes down what the loaders give.
TRAINER = """
import numpy as np
import sys

def main():
    from llamatap.connectors import speculators
    speculators.register()
    from speculators.train import cli
    from speculators.train.config import TrainConfig

    class Trainer:
        def __init__(self, model, config, train, val):
            self.loaders = {"train": train, "val": val}

        def run_training(self):
            found = {}
            for which, loader in self.loaders.items():
                for i, batch in enumerate(loader):
                    assert batch["error_records"] == 0
                    for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask",
                                 "document_ids"):
                        found[f"{which} {i} {name}"] = batch[name][0].float().numpy()
            np.savez(sys.argv[-1], **found)

    cli.Trainer = Trainer
    cli.main(TrainConfig.resolve(sys.argv[1:-1]))

if __name__ == "__main__":
    main()
"""


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONWARNINGS": ""}


def run(*command: str | Path) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(params=["llamatap", "file"])
def connector(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Connector, list[str]]]:
    """A connector, and the options that tell the trainer about it."""
    options = ["--hidden-states-backend", "llamatap"]
    if request.param == "llamatap":
        name = f"test-{uuid.uuid4().hex}"
        found = SharedMemoryConnector(name)
        yield found, [*options, "--llamatap-options", json.dumps({"name": name})]
        shutil.rmtree(found.folder)
    else:
        yield FileConnector(tmp_path / "rows" / "hidden_states"), []


def test_its_command_trains_on_what_is_generated(
    connector: tuple[Connector, list[str]], tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path
) -> None:
    """The command spawns its own workers; the states equal the formulas."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, tiny.n_vocab, n).tolist() for n in (5, 9, 2, 7)]
    where, options = connector
    collect = Collector(where)
    with tiny_model.context(n_ctx=512, n_seq_max=2, **EXACT) as context:
        generate = partial(lt.generate, states="full", prompt_states=True, on_states=collect)
        texts = generate(context, prompts, layers=[*LAYERS, -1], max_tokens=6, ignore_eos=True)
        expected = {(*one.prompt.tolist(), *one.tokens.tolist()): len(one.prompt) for one in texts}
    collect.write_dataset(tmp_path / "rows")
    write_verifier(tmp_path / "verifier", tiny)
    script, out = tmp_path / "trainer.py", tmp_path / "found.npz"
    script.write_text(TRAINER)
    command: list[str | Path] = [
        *(script, "--verifier-name-or-path", tmp_path / "verifier", "--speculator-type", "eagle3"),
        *("--target-layer-ids", "1", "2", "3", "--data-path", tmp_path / "rows"),
        *options,
        *("--on-missing", "raise", "--total-seq-len", "64", "--train-data-ratio", "0.75"),
        *("--num-workers", "1", "--save-path", tmp_path / "saved", out),
    ]
    run(*command)
    found = np.load(out)
    seen = []
    for key in (one.removesuffix(" input_ids") for one in found.files if one.endswith(" input_ids")):
        batch = {
            name: found[f"{key} {name}"]
            for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask")
        }
        documents = found[f"{key} document_ids"]
        for document in range(int(documents.max()) + 1):
            part = documents == document
            # Shifted by one: at t the token t+1, the states of t, and the last layer's of t+1.
            rest = batch["input_ids"][part].astype(int).tolist()
            (text,) = (one for one in expected if list(one[1:]) == rest)
            seen.append(text)
            streams, _, _ = decoder.forward(
                tiny.shape(), tiny.weights, tiny.entering(np.array(text, np.int32))
            )
            given = np.concatenate([streams[k] for k in LAYERS], 1)
            assert relative(batch["hidden_states"][part], given[:-1]) < 8e-3
            last = streams[tiny.n_layer][1:]
            assert relative(batch["verifier_last_hidden_states"][part], last) < 8e-3
            mask = [0] * (expected[text] - 1) + [1] * 6
            assert batch["loss_mask"][part].tolist() == mask
    assert sorted(seen) == sorted(expected)


def test_the_command_knows_the_back_end() -> None:
    found = run("-m", "llamatap.connectors.speculators", "train", "--help")
    assert "{file,fp8,mooncake,llamatap}" in found
    assert "--llamatap-connector" in found
    assert "--llamatap-options" in found


def test_what_the_command_cannot_do_is_refused() -> None:
    """Options that are none, and a registration that comes too late."""
    from llamatap.connectors.speculators import ConnectorBackend

    for name, options, message in (
        ("files", "folder", "as a JSON object; found 'folder'"),
        ("files", "[1]", "as a JSON object"),
        ("files", '{"directory": "x"}', "--llamatap-options must be the options of 'files'.*directory"),
        ("nowhere", "{}", "there is no connector 'nowhere'"),
    ):
        arguments: Any = type("Arguments", (), {"llamatap_connector": name, "llamatap_options": options})
        with pytest.raises(lt.InvalidInputError, match=message):
            ConnectorBackend.from_train_args(arguments, "")
    with pytest.raises(lt.UnsupportedError, match="llamatap does"):
        ConnectorBackend.build_kv_transfer_config(arguments)
    code = (
        "import speculators.train.config.resolution, llamatap as lt\n"
        "from llamatap.connectors.speculators import register\n"
        "try:\n    register()\nexcept lt.UnsupportedError as error:\n    print(error)\n"
    )
    assert "before importing speculators.train" in run("-c", code)
    code = "from llamatap.connectors.speculators import register\nregister()\nregister()\nprint('twice')"
    assert run("-c", code) == "twice\n"
