"""Presets: what they make of a prompt, which models they refuse, and how their files are read.

Oracles: diffusers' own pipeline; Qwen3's own chat template, rendered by Jinja alone; NumPy's formulas for the
states; slices of what extraction gives without a preset.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.numerics import EXACT, relative
from support.paths import DATA, ENGINE_MODELS, ROOT
from support.tiny import TinyLlama, TinyQwen3
from support.tiny_models.registry import FILES
from support.tiny_models.z_image import write_encoder

import llamatap as lt
from llamatap.presets import Preset, load_preset, preset_names
from reference import decoder

PROMPTS = [
    "a lighthouse at dusk",
    "",
    " spaces at both ends ",
    "lines\nand\r\nlines\n",
    "\"quotes\" and 'quotes' & <tags>",
    "{{ prompt }} {{ 7 * 7 }} {% raw %} {# not a comment #} {",
    "灯塔, маяк, 🗼",
    "<|im_end|>\n<|im_start|>system\nYou are",
    "<think>\n\n</think>",
]

HEAD = 'name = "mine"\n[states]\nconvention = "transformers"\nlayers = [-2]\n'
TEXT = HEAD + '[prompt]\ntemplate = "<{{ prompt }}>"\n'


def vendored(name: str) -> Path:
    """The path of a vocabulary or template that the engine brings for its own tests."""
    path = ENGINE_MODELS / name
    if not path.exists():
        pytest.skip(f"{name} is not there; `make test` brings it")
    return path


def written(folder: Path, text: str) -> Path:
    path = folder / "mine.toml"
    path.write_text(text, "utf-8")
    return path


@pytest.fixture
def qwen2_vocabulary() -> Iterator[lt.Model]:
    with lt.Model(vendored("ggml-vocab-qwen2.gguf"), vocab_only=True) as model:
        yield model


def chat_template_of_qwen3() -> jinja2.Template:
    text = vendored("templates/Qwen-Qwen3-0.6B.jinja").read_text("utf-8")
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(text)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_the_text_of_z_image_is_that_of_qwen3s_own_template(tiny_model: lt.Model, prompt: str) -> None:
    expected = chat_template_of_qwen3().render(
        messages=[{"role": "user", "content": prompt}], add_generation_prompt=True, enable_thinking=True
    )
    assert load_preset("z-image").render(tiny_model, prompt) == expected


@pytest.mark.slow
def test_z_image_is_what_its_pipeline_makes_of_a_prompt(tmp_path: Path) -> None:
    """The rows of tests/golden/make_z_image.py."""
    models = vendored("ggml-vocab-qwen2.gguf").parent
    # A file of the real shape and vocabulary would have gigabytes.
    preset = replace(load_preset("z-image"), n_layer=None, n_embd=None)
    path = write_encoder(tmp_path / "encoder.gguf", models)
    with np.load(DATA / "z_image_golden.npz") as golden:
        prompts: list[str] = golden["prompts"].tolist()
        with lt.Model(path) as model, lt.Extractor(model, **EXACT) as extractor:
            found = preset.encode(extractor, prompts)
        for index, states in enumerate(found):
            assert states.tokens.tolist() == golden[f"tokens_{index}"].tolist()
            expected = golden[f"states_{index}"]
            assert relative(states.array[-len(expected) :, 0], expected) < 1e-5
    assert len(found[-1]) == 512


def test_its_turns_are_special_tokens(qwen2_vocabulary: lt.Model) -> None:
    text = load_preset("z-image").render(qwen2_vocabulary, "a {{ x }}")
    tokens = qwen2_vocabulary.tokenize(text).tolist()
    start, end, newline = 151644, 151645, 198
    inside = qwen2_vocabulary.tokenize("a {{ x }}").tolist()
    user, assistant = (qwen2_vocabulary.tokenize(word).tolist() for word in ("user", "assistant"))
    assert tokens == [start, *user, newline, *inside, end, newline, start, *assistant, newline]


@pytest.mark.slow
def test_z_image_takes_what_enters_the_last_block_of_at_most_512_tokens(tmp_path: Path) -> None:
    # Qwen3-4B's shape where the preset checks it, otherwise as small as possible.
    tiny = TinyQwen3(n_layer=36, n_embd=2560, n_head=1, n_head_kv=1, n_ff=8)
    path = tiny.write(tmp_path / "shaped.gguf")
    preset = load_preset("z-image")
    prompt = "{{a}}灯塔"
    text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
    # The vocabulary: BOS is 1, and the byte b is b + 3 (there are no spaces, which it writes otherwise).
    tokens = np.array([1, *(byte + 3 for byte in text.encode())])
    with lt.Model(path) as model, lt.Extractor(model, **EXACT) as extractor:
        assert preset.layer_ids(model) == [35]
        found, cut = preset.encode(extractor, [prompt, "x" * 600])
        provenance = found.provenance
    assert found.tokens.tolist() == tokens.tolist()
    states, _, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    assert found.array.shape == (len(tokens), 1, 2560)
    assert relative(found.array[:, 0], states[35]) < 1e-5
    assert relative(states[34], states[35]) > 1e-3
    assert relative(states[36], states[35]) > 1e-3
    assert len(cut) == 512
    assert cut.tokens[-1] == ord("x") + 3
    assert (provenance["preset"], provenance["max_length"]) == ("z-image", 512)
    assert (provenance["layers"], provenance["norm"]) == ([35], ["pre"])


@pytest.mark.parametrize(
    ("tiny", "found"),
    [
        (TinyQwen3(n_layer=36, n_embd=64), "qwen3, 36 layers, width 64"),
        (TinyQwen3(n_layer=4, n_embd=2560, n_head=1, n_head_kv=1, n_ff=8), "qwen3, 4 layers, width 2560"),
        (TinyLlama(), "llama, 4 layers, width 64"),
    ],
)
def test_another_model_is_refused_by_name(tiny: TinyLlama, found: str, tmp_path: Path) -> None:
    with lt.Model(tiny.write(tmp_path / "other.gguf")) as model:
        for refused in (load_preset("z-image").check, lambda m: load_preset("z-image").encode(m, "a")):
            with pytest.raises(lt.InvalidInputError) as raised:
                refused(model)
            assert str(raised.value) == (
                "preset z-image is made for Qwen3-4B (qwen3, 36 layers, width 2560); other.gguf (tiny) has "
                f"{found}. Give a GGUF file of Qwen3-4B"
            )


@pytest.mark.parametrize(
    ("key", "right", "wrong"),
    [("architecture", '"llama"', '"qwen3"'), ("n_layer", 4, 5), ("n_embd", 64, 65)],
)
def test_each_fact_is_checked_by_itself(
    key: str, right: object, wrong: object, tiny_model: lt.Model, tmp_path: Path
) -> None:
    load_preset(written(tmp_path, f"{TEXT}[model]\n{key} = {right}")).check(tiny_model)
    preset = load_preset(written(tmp_path, f"{TEXT}[model]\n{key} = {wrong}"))
    with pytest.raises(lt.InvalidInputError, match=str(wrong).strip('"')):
        preset.check(tiny_model)


@pytest.mark.parametrize("rows", [None, "2:", ":-3", "1:4", "-5:-1"])
@pytest.mark.parametrize(
    ("convention", "layers", "own"),
    [
        ("transformers", [-2, 1], [3, 1]),
        ("transformers", [-1], ["norm"]),
        ("llamatap", [-1, "norm"], [4, "norm"]),
        ("specforge", [0, 3], [1, 4]),
    ],
)
def test_rows_and_layers_are_those_of_extraction(
    rows: str | None,
    convention: str,
    layers: list[Any],
    own: list[Any],
    tiny_model: lt.Model,
    tmp_path: Path,
) -> None:
    ids = str(layers).replace("'", '"')
    text = 'name = "m"\n[prompt]\ntemplate = "<{{ prompt }}>\\n"\nmax_length = 9\n[states]\n'
    text += f'layers = {ids}\nconvention = "{convention}"\n' + (f'rows = "{rows}"\n' if rows else "")
    preset = load_preset(written(tmp_path, text))
    start, stop = (int(end) if end else None for end in (rows or ":").split(":"))
    prompts = ["abc", "{{ prompt }} and more"]
    with lt.Extractor(tiny_model, **EXACT) as extractor:
        expected = extractor([f"<{prompt}>\n" for prompt in prompts], own)
        found = preset.encode(extractor, prompts)
        single = preset.encode(extractor, prompts[0], dtype="bfloat16")
    for ours, whole in zip(found, expected, strict=True):
        assert list(ours.layers) == own
        # Fewer tokens are other shapes, and other kernels.
        assert relative(ours.array, whole.array[:9][start:stop]) < 1e-5
        assert ours.tokens.tolist() == whole.tokens[:9][start:stop].tolist()
        assert ours.provenance["preset"] == "m"
    assert single.array.shape == found[0].array.shape
    assert single.array.dtype.name == "bfloat16"


def test_a_text_without_rows_names_the_preset_and_them(tiny_model: lt.Model, tmp_path: Path) -> None:
    """BOS, "<", the prompt, ">"; what max_length keeps of it counts."""
    told = TEXT.replace("layers", 'rows = "6:-1"\nlayers') + "max_length = 8"
    preset = load_preset(written(tmp_path, told))
    assert len(preset.encode(tiny_model, "abcdef")) == 1
    for prompt, n in (("abcd", 7), ("abc", 6)):
        message = f'preset mine keeps the rows "6:-1" of a text, but this one has {n} tokens'
        with pytest.raises(lt.InvalidInputError, match=f"^{message}"):
            preset.encode(tiny_model, prompt)
        with pytest.raises(lt.InvalidInputError, match=f"^input 1: {message}"):
            preset.encode(tiny_model, ["abcdef", prompt])
    preset = load_preset(written(tmp_path, told.replace('"6:-1"', '"7:-1"')))
    with pytest.raises(
        lt.InvalidInputError, match='keeps the rows "7:-1" of a text, but this one has 8 tokens'
    ):
        preset.encode(tiny_model, "abcdefghi")


def test_states_say_whether_the_text_was_cut(tiny_model: lt.Model, tmp_path: Path) -> None:
    preset = load_preset(written(tmp_path, TEXT + "max_length = 8"))
    found = preset.encode(tiny_model, ["abcde", "abcdef"])
    assert [states.truncated for states in found] == [False, True]
    assert [states.provenance["prompt_tokens"] for states in found] == [8, 9]


def test_models_contexts_and_extractors_do(tiny_model: lt.Model, tmp_path: Path) -> None:
    preset = load_preset(written(tmp_path, TEXT))
    with tiny_model.context(n_ctx=64, type_k="f32") as context, lt.Extractor(tiny_model) as extractor:
        for computes, type_k in ((tiny_model, "f16"), (context, "f32"), (extractor, "f16")):
            states = preset.encode(computes, "abc")
            assert states.tokens.tolist() == [1, *(ord(c) + 3 for c in "<abc>")]
            assert states.provenance["type_k"] == type_k
    with pytest.raises(lt.InvalidInputError, match="found str"):
        preset.encode("model.gguf", "abc")  # type: ignore[call-overload]
    wrongs: list[Any] = [5, b"abc", [b"abc"], [5]]
    for wrong in wrongs:
        with pytest.raises(lt.InvalidInputError, match="must be a str"):
            preset.encode(tiny_model, wrong)


def test_without_a_template_it_is_the_models_own(tmp_path: Path) -> None:
    own = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}{{ mood }}"
    )
    with lt.Model(TinyLlama().write(tmp_path / "tiny.gguf", chat_template=own)) as model:
        assert load_preset(written(tmp_path, HEAD)).render(model, "{{ x }}") == "[user]{{ x }}>"
        told = HEAD + '[prompt.template_variables]\nmood = "glad"\nadd_generation_prompt = false\n'
        assert load_preset(written(tmp_path, told)).render(model, "a") == "[user]aglad"


def test_the_models_layers_are_the_range(tiny_model: lt.Model, tmp_path: Path) -> None:
    preset = load_preset(written(tmp_path, TEXT.replace("-2", "9")))
    with pytest.raises(lt.InvalidInputError, match=r"preset mine: layer id 9 is not in -5\.\.4"):
        preset.encode(tiny_model, "abc")
    with pytest.raises(lt.InvalidInputError, match=r"mine\.toml: layer id 9 is not in"):
        load_preset(written(tmp_path, TEXT.replace("-2", "9") + "[model]\nn_layer = 8\n"))


def test_the_last_layer_of_a_model_without_a_final_norm(tmp_path: Path) -> None:
    with lt.Model(FILES["bert"]().write(tmp_path / "bert.gguf")) as model:
        assert load_preset(written(tmp_path, TEXT.replace("-2", "-1"))).layer_ids(model) == [3]


def test_all_that_are_built_in_load() -> None:
    assert preset_names() == ["z-image"]
    for name in preset_names():
        preset = load_preset(name)
        assert preset.name == name
        assert preset.description
        assert preset.source
        assert isinstance(hash(preset), int)


def test_names_and_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = written(tmp_path, TEXT)
    path.with_name("noend").write_text(TEXT)
    for given_as in ("mine.toml", path, str(path), "./noend", Path("noend")):
        assert load_preset(given_as).name == "mine"
    with pytest.raises(
        lt.InvalidInputError, match="no preset is called 'noend'; there are z-image, and a path"
    ):
        load_preset("noend")
    for missing in ("nowhere.toml", "no/where", Path("z-image")):
        with pytest.raises(lt.InvalidInputError, match=f"no preset file {missing}; built in are z-image"):
            load_preset(missing)
    with pytest.raises(lt.InvalidInputError, match="not int"):
        load_preset(5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name = ", "this is not TOML"),
        ("a = " + "[" * 10_000, "this is not TOML"),
        (TEXT.replace('name = "mine"', ""), "name is missing"),
        (TEXT.replace('"mine"', '""'), "name must be a line"),
        (TEXT.replace('"mine"', "5"), "name must be a text in quotes, not 5"),
        ('name = "mine"', "states is missing"),
        (TEXT.replace("layers = [-2]", ""), "states.layers is missing; it is a list"),
        (TEXT.replace('convention = "transformers"', ""), "states.convention is missing"),
        (
            TEXT.replace("transformers", "torch"),
            "unknown convention 'torch'; known are llamatap, transformers",
        ),
        (TEXT.replace("[-2]", "-2"), "states.layers must be a list of layer ids"),
        (TEXT.replace("[-2]", "[]"), "layers is empty"),
        (TEXT.replace("[-2]", "[true]"), "states.layers must be a list of layer ids"),
        (TEXT.replace("[-2]", '["last"]'), "states.layers must be a list of layer ids"),
        (TEXT.replace("[-2]", '["norm"]'), "a layer id of transformers is an integer"),
        (TEXT.replace("[-2]", "[-2.0]"), "states.layers must be a list of layer ids"),
        (TEXT.replace("transformers", "vllm"), "layer id -2 is not in 0"),
        (TEXT + "max_lenght = 5", "unknown key prompt.max_lenght; known are template"),
        (TEXT + "max_length = 0", "prompt.max_length must be a whole number of at least 1, not 0"),
        (TEXT + "max_length = true", "prompt.max_length must be a whole number of at least 1, not True"),
        (TEXT + "[model]\nn_embd = '64'", "model.n_embd must be a whole number of at least 1, not '64'"),
        (TEXT + "[model]\nn_layer = 99999999999", "model.n_layer must be a whole number"),
        (TEXT + "[models]", "unknown key models; known are name"),
        ("model = 5\n" + TEXT, "model must be a table, not 5"),
        (TEXT.replace("layers", 'rows = "34"\nlayers'), "states.rows: expected START:STOP, found '34'"),
        (TEXT.replace("layers", 'rows = "5:5"\nlayers'), r'rows "5:5" keep no row of any text$'),
        (TEXT.replace("layers", 'rows = "-5:0"\nlayers'), r'rows "-5:0" keep no row of any text$'),
        (TEXT.replace("layers", 'rows = "-2:-5"\nlayers'), r'rows "-2:-5" keep no row of any text$'),
        (
            TEXT.replace("layers", 'rows = "8:"\nlayers') + "max_length = 8",
            r'rows "8:" keep no row of any text of at most 8 tokens \(max_length\)$',
        ),
        (TEXT.replace("layers", "rows = [1, 2]\nlayers"), "states.rows must be a text"),
        (TEXT.replace("prompt }}", "promt }}"), "the template does not use the prompt"),
        (TEXT.replace("prompt }}", "prompt }}{{ tone }}"), "the template uses tone; the only variable"),
        (TEXT.replace("prompt }}", "prompt }"), "the template is broken"),
        (TEXT + "[prompt.template_variables]\na = 1", "template_variables are for the model's own"),
        (HEAD + "[prompt.template_variables]\nmessages = []", "must not set messages"),
        (HEAD + "[prompt.template_variables]\ntemplate = ''", "must not set template"),
    ],
)
def test_a_file_that_is_wrong_is_told_what_is(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(lt.InvalidInputError, match=rf"mine\.toml: .*{message}"):
        load_preset(written(tmp_path, text))


def test_text_that_is_not_utf8_and_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_bytes(TEXT.encode("utf-16"))
    with pytest.raises(lt.InvalidInputError, match="this is not TOML"):
        load_preset(path)
    path.write_bytes(TEXT.replace("\n", "\r\n").encode("utf-8-sig"))
    assert load_preset(path).template == "<{{ prompt }}>"


def test_a_template_is_in_the_sandbox(tiny_model: lt.Model) -> None:
    reaching = "{{ prompt.__class__.__mro__[1].__subclasses__() }}"
    preset = Preset(name="bad", convention="llamatap", layers=(1,), template=reaching)
    with pytest.raises(lt.InvalidInputError, match="the template failed"):
        preset.render(tiny_model, "a")


@pytest.mark.fuzz
@given(prompt=st.text(st.characters(codec="utf-8")))
@settings(derandomize=True, deadline=None, database=None)
def test_any_prompt_goes_in_as_it_is(tiny_model: lt.Model, prompt: str) -> None:
    preset = Preset(name="x", convention="llamatap", layers=(1,), template="a\n{{ prompt }}\nb\n")
    assert preset.render(tiny_model, prompt) == f"a\n{prompt}\nb\n"


values = st.recursive(
    st.one_of(
        st.integers(-5, 2**40).map(str),
        st.sampled_from(
            ["true", "1.5", "nan", '"x"', '"{{ prompt }}"', '"llamatap"', '"1:"', "1979-05-27", '""']
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: f"[{', '.join(items)}]"),
        inner.map(lambda item: f"{{ name = {item} }}"),
    ),
    max_leaves=4,
)
names = st.sampled_from(
    [
        *("name", "description", "source", "other", "model", "model.name", "model.n_layer"),
        *("prompt", "prompt.template", "prompt.max_length", "prompt.template_variables"),
        *("states", "states.convention", "states.layers", "states.rows"),
    ]
)


@pytest.mark.fuzz
@given(entries=st.dictionaries(names, values), junk=st.sampled_from(["", *string.punctuation]))
@settings(derandomize=True, deadline=None, database=None, max_examples=300)
def test_odd_files_load_or_raise(
    entries: dict[str, str], junk: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    base = {"name": '"m"', "states.convention": '"llamatap"', "states.layers": "[1]"}
    text = "".join(f"{key} = {value}\n" for key, value in {**base, **entries}.items()) + junk
    path = written(tmp_path_factory.getbasetemp(), text)
    message = ""
    try:
        load_preset(path)
    except lt.InvalidInputError as error:
        message = str(error)
    assert message == "" or message.startswith(f"{path}: ")


def test_the_preset_of_the_docs(smollm2: lt.Model, tmp_path: Path) -> None:
    docs = (ROOT / "docs" / "presets.md").read_text("utf-8")
    preset = load_preset(written(tmp_path, docs.split("```toml\n")[1].split("```")[0]))
    text = "<|im_start|>user\na red door<|im_end|>\n<|im_start|>assistant\n"
    states = preset.encode(smollm2, "a red door")
    assert smollm2.detokenize(states.tokens) == text
    assert states.array.shape == (12, 1, 576)
    assert states.layers == (29,)
