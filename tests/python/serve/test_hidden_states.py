"""``POST /v1/hidden_states``: field for field as its specification has it, and what goes beyond."""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray
from support.numerics import EXACT, computes_with_nan, relative
from support.servers import Running, running, tiny_options
from support.tiny import TinyLlama
from support.tiny_models.encoders import bert

import llamatap as lt
from llamatap.serve import ServerOptions
from reference import decoder

#: The specification's own: a prompt with its chat template applied.
PROMPT = (
    "<|im_start|>user\nA beautiful sunset over the ocean<|im_end|>\n"
    "<|im_start|>assistant\n<think>\n</think>\n"
)


@pytest.fixture(scope="module")
def server(tiny_path: Path) -> Iterator[Running]:
    with running([tiny_options(tiny_path)]) as found:
        yield found


def oracle(tiny: TinyLlama, tokens: NDArray[np.int32], layer: int) -> NDArray[np.float64]:
    """transformers' hidden_states[layer], in NumPy: the last one is normed."""
    streams, normed, _ = decoder.forward(tiny.shape(), tiny.weights, tiny.entering(tokens))
    found: NDArray[np.float64] = [*streams[:-1], normed][layer]
    return found


def lists(answer: Any) -> NDArray[np.float32]:
    return np.array(answer["hidden_states"], np.float32)


def from_base64(answer: Any) -> NDArray[np.float32]:
    """Decode a body as a client written from the specification does."""
    raw = base64.b64decode(answer["hidden_states"])
    return np.frombuffer(raw, dtype=np.float32).reshape(answer["shape"])


def test_the_specifications_request(server: Running, tiny: TinyLlama, tiny_model: lt.Model) -> None:
    answer = server.post(
        "/v1/hidden_states",
        input=PROMPT,
        model="tiny",
        layer=-2,
        max_length=512,
        return_attention_mask=False,
        encoding_format="float",
    )
    tokens = tiny_model.tokenize(PROMPT)
    assert answer["shape"] == [len(tokens), tiny.n_embd]
    assert answer["model"] == "tiny"
    assert answer["layer"] == -2
    assert answer["dtype"] == "float32"
    assert "attention_mask" not in answer
    assert "encoding_format" not in answer
    assert len(answer["hidden_states"]) == len(tokens)
    assert len(answer["hidden_states"][0]) == tiny.n_embd
    assert relative(lists(answer), oracle(tiny, tokens, -2)) < 1e-5


def test_the_user_changes_nothing(server: Running) -> None:
    """A field of OpenAI's, which their clients send with embeddings."""
    assert server.states(input=PROMPT, user="me") == server.states(input=PROMPT)
    assert server.states(input=PROMPT, user=None) == server.states(input=PROMPT)
    server.error("/v1/hidden_states", 400, "invalid_request_error", model="tiny", input=PROMPT, user=5)


def test_the_defaults_are_the_specifications(server: Running, tiny: TinyLlama, tiny_model: lt.Model) -> None:
    text = "x" * 700
    short = server.states(input=text)
    explicit = server.states(
        input=text, layer=-2, max_length=512, return_attention_mask=False, encoding_format="float"
    )
    assert short == explicit
    assert short["shape"] == [512, tiny.n_embd]
    assert short["truncated"] is True
    # Cut on the right.
    assert relative(lists(short), oracle(tiny, tiny_model.tokenize(text)[:512], -2)) < 1e-5


def test_base64_is_read_as_the_specification_reads_it(
    server: Running, tiny: TinyLlama, tiny_model: lt.Model
) -> None:
    answer = server.states(input=PROMPT, encoding_format="base64", return_attention_mask=True)
    tokens = tiny_model.tokenize(PROMPT)
    assert answer["encoding_format"] == "base64"
    assert answer["attention_mask"] == [1] * len(tokens)
    assert relative(from_base64(answer), oracle(tiny, tokens, -2)) < 1e-5


def test_the_numbers_of_lists_are_those_of_base64(server: Running) -> None:
    listed = lists(server.states(input=PROMPT))
    np.testing.assert_array_equal(listed, from_base64(server.states(input=PROMPT, encoding_format="base64")))


@pytest.mark.parametrize("layer", [0, 1, 2, 3, 4, -1, -2, -3, -4, -5])
def test_layers_count_as_transformers_counts(
    server: Running, tiny: TinyLlama, tiny_model: lt.Model, layer: int
) -> None:
    answer = server.states(input="count", layer=layer)
    assert answer["layer"] == layer
    assert relative(lists(answer), oracle(tiny, tiny_model.tokenize("count"), layer)) < 1e-5


def test_several_layers_have_an_axis(server: Running, tiny: TinyLlama, tiny_model: lt.Model) -> None:
    wanted = [3, -1, 0, 3]
    answer = server.states(input="many layers", layers=wanted)
    tokens = tiny_model.tokenize("many layers")
    assert "layer" not in answer
    assert answer["layers"] == wanted
    assert answer["shape"] == [len(tokens), 4, tiny.n_embd]
    found = lists(answer)
    for column, layer in enumerate(wanted):
        assert relative(found[:, column], oracle(tiny, tokens, layer)) < 1e-5
    flat = server.states(input="many layers", layers=[1])
    assert flat["shape"] == [len(tokens), 1, tiny.n_embd]


def test_token_ids_and_lists(server: Running, tiny: TinyLlama, tiny_model: lt.Model) -> None:
    ids = [5, 77, 200, 9]
    one = server.states(input=ids, return_tokens=True)
    assert one["token_ids"] == ids
    assert one["tokens"][1] == chr(77 - 3)
    assert relative(lists(one), oracle(tiny, np.array(ids, np.int32), -2)) < 1e-5

    answer = server.states(input=["first", "a second one"], layer=2, encoding_format="base64", max_length=6)
    assert [entry["index"] for entry in answer["data"]] == [0, 1]
    assert [entry["truncated"] for entry in answer["data"]] == [False, True]
    assert answer["encoding_format"] == "base64"
    assert "hidden_states" not in answer
    for text, entry in zip(["first", "a second one"], answer["data"], strict=True):
        tokens = tiny_model.tokenize(text)[:6]
        assert entry["shape"] == [len(tokens), tiny.n_embd]
        assert relative(from_base64(entry), oracle(tiny, tokens, 2)) < 1e-5

    of_ids = server.states(input=[[5, 6], [7]])
    assert [entry["shape"][0] for entry in of_ids["data"]] == [2, 1]
    assert len(server.states(input=["one"])["data"]) == 1


@pytest.mark.parametrize("pooling", ["mean", "last", "max"])
def test_pooling(server: Running, tiny: TinyLlama, tiny_model: lt.Model, pooling: str) -> None:
    answer = server.states(input="pool me", pooling=pooling)
    rows = oracle(tiny, tiny_model.tokenize("pool me"), -2)
    expected = {"mean": rows.mean(0), "last": rows[-1], "max": rows.max(0)}[pooling]
    assert answer["shape"] == [tiny.n_embd]
    assert answer["pooling"] == pooling
    assert relative(lists(answer), expected) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "numpy_dtype", "tolerance"),
    [("float16", np.float16, 1e-3), ("bfloat16", ml_dtypes.bfloat16, 8e-3), ("float32", np.float32, 1e-5)],
)
def test_dtypes_by_name(
    server: Running, tiny: TinyLlama, tiny_model: lt.Model, dtype: str, numpy_dtype: Any, tolerance: float
) -> None:
    expected = oracle(tiny, tiny_model.tokenize("precision"), -2)
    answer = server.states(input="precision", dtype=dtype, encoding_format="base64")
    assert answer["dtype"] == dtype
    raw = base64.b64decode(answer["hidden_states"])
    assert len(raw) == expected.size * np.dtype(numpy_dtype).itemsize
    found = np.frombuffer(raw, numpy_dtype).reshape(answer["shape"]).astype(np.float32)
    assert relative(found, expected) < tolerance
    # Numbers in lists are rounded in the same way.
    np.testing.assert_array_equal(lists(server.states(input="precision", dtype=dtype)), found)


def read_safetensors(data: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The format by its own description, not by the library that wrote it."""
    (n,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + n])
    metadata = header.pop("__metadata__", {})
    dtypes = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "I64": np.int64}
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = data[8 + n + begin : 8 + n + end]
        tensors[name] = np.frombuffer(raw, dtypes[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def test_a_safetensors_body(server: Running, tiny: TinyLlama, tiny_model: lt.Model) -> None:
    body = {"model": "tiny", "input": PROMPT, "encoding_format": "safetensors", "return_attention_mask": True}
    response = server.client.post("/v1/hidden_states", json=body)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/octet-stream"
    tensors, metadata = read_safetensors(response.content)
    tokens = tiny_model.tokenize(PROMPT)
    assert relative(tensors["hidden_states"], oracle(tiny, tokens, -2)) < 1e-5
    np.testing.assert_array_equal(tensors["token_ids"], tokens)
    np.testing.assert_array_equal(tensors["attention_mask"], np.ones(len(tokens)))
    assert metadata["model"] == "tiny"
    assert metadata["layer"] == "-2"
    assert json.loads(metadata["provenance"])["arch"] == "llama"
    # The binary body is about as large as the states.
    assert len(response.content) < tensors["hidden_states"].nbytes + 4096

    several = server.client.post(
        "/v1/hidden_states", json=body | {"input": ["a", "bc"], "dtype": "bfloat16", "layers": [0, 4]}
    )
    tensors, metadata = read_safetensors(several.content)
    assert tensors["hidden_states.1"].shape == (len(tiny_model.tokenize("bc")), 2, tiny.n_embd)
    assert tensors["hidden_states.0"].dtype == ml_dtypes.bfloat16
    assert metadata["layers"] == "[0, 4]"


def test_a_safetensors_body_loads_as_states(server: Running, tiny_model: lt.Model, tmp_path: Path) -> None:
    path = tmp_path / "body.safetensors"
    cases: list[tuple[dict[str, Any], list[lt.LayerId]]] = [
        ({}, [3]),
        ({"layer": -1, "dtype": "bfloat16"}, ["norm"]),
        ({"layers": [0, -1]}, [0, "norm"]),
        ({"pooling": "mean"}, [3]),
        ({"pooling": "mean", "layers": [0, 1]}, [0, 1]),
        ({"max_length": 3}, [3]),
    ]
    for options, layers in cases:
        body = {"model": "tiny", "input": PROMPT, "encoding_format": "safetensors", **options}
        path.write_bytes(server.client.post("/v1/hidden_states", json=body).content)
        found = lt.States.load(path)
        expected = lt.extract(
            tiny_model,
            PROMPT,
            layers,
            dtype=options.get("dtype"),
            pool=options.get("pooling"),
            max_length=options.get("max_length"),
        )
        assert list(found.layers) == layers
        assert found.array.shape == expected.array.shape
        assert found.array.dtype == expected.array.dtype
        assert found.tokens.tolist() == expected.tokens.tolist()
        assert relative(found.array, expected.array) < 1e-2
        assert found.truncated == expected.truncated == ("max_length" in options)
        for key in ("model", "model_sha256", "layers", "norm", "convention", "arch"):
            assert found.provenance[key] == expected.provenance[key]
    path.write_bytes(server.client.post("/v1/hidden_states", json=body | {"input": ["a", "b"]}).content)
    with pytest.raises(lt.InvalidInputError, match=r"several prompts \(hidden_states\.0, hidden_states\.1\)"):
        lt.States.load(path)


def test_provenance_says_what_it_is(server: Running, tiny_model: lt.Model) -> None:
    cases: list[tuple[int, str, lt.LayerId]] = [(-2, "pre", 3), (-1, "post", "norm"), (0, "pre", 0)]
    for layer, norm, own in cases:
        provenance = server.states(input="where from", layer=layer)["provenance"]
        expected = lt.extract(tiny_model, "where from", layers=[own]).provenance
        assert provenance["model_sha256"] == expected["model_sha256"] is not None
        assert provenance["norm"] == [norm]
        assert provenance["layers"] == [own]
        assert provenance["engine_commit"] == expected["engine_commit"]


def test_a_model_without_a_tokenizer(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "none.gguf", tokenizer=False)
    with running([tiny_options(path)]) as server:
        answer = server.states(input=[5, 6], return_tokens=True)
        assert answer["token_ids"] == [5, 6]
        assert "tokens" not in answer
        assert relative(lists(answer), oracle(tiny, np.array([5, 6], np.int32), -2)) < 1e-5
        message = server.error("/v1/hidden_states", 422, "model_error", model="tiny", input="text")
        assert "no tokenizer" in message


def test_special_tokens_in_the_text_are_recognised(server: Running) -> None:
    answer = server.states(input="<s>ab</s>", return_tokens=True)
    assert answer["token_ids"] == [1, ord("a") + 3, ord("b") + 3, 2]


def test_an_encoder_counts_as_transformers_does(tmp_path: Path) -> None:
    path = bert().write(tmp_path / "bert.gguf")
    with running([tiny_options(path)]) as server, lt.Model(path) as model:
        answer = server.states(input=[5, 6, 7], layer=-1)
        expected = lt.Extractor(model, **EXACT)([5, 6, 7], layers=[model.n_layer]).array[:, 0]
        assert relative(lists(answer), expected) < 1e-5


def test_several_models(tiny_path: Path, tmp_path: Path) -> None:
    other = TinyLlama(n_embd=32, n_layer=2, seed=5)
    other.write(tmp_path / "other.gguf")
    options = [tiny_options(tiny_path), tiny_options(tmp_path / "other.gguf", name="other")]
    with running(options) as server:
        assert [one["id"] for one in server.client.get("/v1/models").json()["data"]] == ["tiny", "other"]
        answer = server.states(input=[5, 6], model="other")
        assert relative(lists(answer), oracle(other, np.array([5, 6], np.int32), -2)) < 1e-5
        assert server.states(input=[5, 6])["shape"] == [2, 64]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "input is missing"),
        ({"input": ""}, "empty"),
        ({"input": []}, "list of prompts is empty"),
        ({"input": [[]]}, "empty"),
        ({"input": ["ok", ""]}, "input 1"),
        ({"input": [300]}, "0..258"),
        ({"input": [-1]}, "input"),
        ({"input": [1.5]}, "input"),
        ({"input": [True]}, "input"),
        ({"input": [[1, 2], 3]}, "input"),
        ({"input": ["a", 3]}, "input"),
        ({"input": {"a": 1}}, "input"),
        ({"input": 5}, "input"),
        ({"input": "a", "layer": 5}, "-5..4"),
        ({"input": "a", "layer": -6}, "-5..4"),
        ({"input": "a", "layer": 1.5}, "layer"),
        ({"input": "a", "layer": "2"}, "layer"),
        ({"input": "a", "layer": True}, "layer"),
        ({"input": "a", "layers": []}, "layers"),
        ({"input": "a", "layers": [1, 9]}, "-5..4"),
        ({"input": "a", "layer": 1, "layers": [1]}, "not both"),
        ({"input": "a", "max_length": 0}, "max_length"),
        ({"input": "a", "max_length": 40000}, "at most 32768"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "a", "dtype": "int8"}, "dtype"),
        ({"input": "a", "pooling": "cls"}, "pooling"),
        ({"input": "a", "stream": True}, "stream is not a field"),
        ({"input": "a", "n": 2}, "n is not a field"),
        ({"input": "a", "prompt": "b"}, "needs a preset"),
        ({"prompt": "b"}, "needs a preset"),
        ({"input": "a", "preset": "z-image"}, "takes a prompt"),
        ({"prompt": "a", "preset": "no such"}, "no preset 'no such'"),
        ({"prompt": "a", "preset": "../../etc/passwd"}, "no preset"),
        ({"prompt": "a", "preset": "z-image", "layer": 2}, "chooses the layers"),
    ],
)
def test_wrong_requests(server: Running, body: dict[str, Any], message: str) -> None:
    found = server.error("/v1/hidden_states", 400, "invalid_request_error", model="tiny", **body)
    assert message in found


def test_a_model_that_is_not_there(server: Running) -> None:
    found = server.error("/v1/hidden_states", 404, "model_not_found", model="other", input="a")
    assert "there are tiny" in found


def test_a_model_of_another_shape_is_refused_by_name(server: Running) -> None:
    body = {"model": "tiny", "preset": "z-image", "prompt": "a sunset"}
    found = server.error("/v1/hidden_states", 400, "invalid_request_error", **body)
    assert "2560" in found
    assert "64" in found


PRESET = """
name = "mine"
[model]
n_embd = 64
[prompt]
template = "<s>[{{ prompt }}]"
max_length = 9
[states]
convention = "transformers"
layers = [-3, -1]
rows = "2:"
"""


def test_a_preset_of_ones_own(tiny_path: Path, tiny: TinyLlama, tiny_model: lt.Model, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(PRESET)
    options = ServerOptions(presets=(tmp_path / "mine.toml",))
    with running([tiny_options(tiny_path)], options) as server:
        for prompt, text in (
            ("abc", "<s>[abc]"),
            ("{{ x }}", "<s>[{{ x }}]"),
            ("long" * 9, "<s>[" + "long" * 9),
        ):
            answer = server.states(prompt=prompt, preset="mine", return_tokens=True)
            tokens = tiny_model.tokenize(text)[:9]
            assert answer["token_ids"] == tokens[2:].tolist()
            assert answer["truncated"] is (len(tiny_model.tokenize(text)) > 9)
            assert answer["preset"] == "mine"
            assert answer["layers"] == [2, 4]
            assert answer["shape"] == [len(tokens) - 2, 2, tiny.n_embd]
            for column, layer in enumerate((2, -1)):
                assert relative(lists(answer)[:, column], oracle(tiny, tokens, layer)[2:]) < 1e-5
        several = server.states(prompt=["a", "bc"], preset="mine")
        assert [entry["shape"][0] for entry in several["data"]] == [2, 3]
        body = {"model": "tiny", "preset": "mine", "prompt": "a", "max_length": 10}
        assert "at most 9" in server.error("/v1/hidden_states", 400, "invalid_request_error", **body)
        none_left = {"model": "tiny", "preset": "mine", "prompt": "a", "max_length": 1}
        message = server.error("/v1/hidden_states", 400, "invalid_request_error", **none_left)
        assert 'preset mine keeps the rows "2:" of a text, but this one has 1 token,' in message


def test_a_preset_without_a_length_takes_the_whole_text(
    tiny_path: Path, tiny_model: lt.Model, tmp_path: Path
) -> None:
    (tmp_path / "file.toml").write_text(PRESET.replace("max_length = 9", "").replace('"mine"', '"whole"'))
    with running([tiny_options(tiny_path)], ServerOptions(presets=(tmp_path / "file.toml",))) as server:
        # The preset's name is the one in the file, not the file's own.
        answer = server.states(prompt="x" * 700, preset="whole")
        assert answer["shape"][0] == len(tiny_model.tokenize("<s>[" + "x" * 700 + "]")) - 2
        assert answer["truncated"] is False
        assert server.states(prompt="x" * 700, preset="whole", max_length=10)["shape"][0] == 8


def test_presets_of_one_name(tiny_path: Path, tmp_path: Path) -> None:
    for name in ("one.toml", "two.toml"):
        (tmp_path / name).write_text(PRESET)
    options = ServerOptions(presets=(tmp_path / "one.toml", tmp_path / "two.toml"))
    with (
        pytest.raises(lt.InvalidInputError, match="there is already a preset 'mine'"),
        running([tiny_options(tiny_path)], options),
    ):
        pass


@pytest.mark.slow
def test_one_prompt_of_several_that_is_too_long(tiny: TinyLlama, tmp_path: Path) -> None:
    path = tiny.write(tmp_path / "tiny.gguf")
    with running([tiny_options(path)]) as server:
        longest = server.worker.limits.prompt
        assert longest > 512
        body = {"model": "tiny", "input": [[5], [6] * (longest + 1)], "max_length": longest + 1}
        message = server.error("/v1/hidden_states", 400, "invalid_request_error", **body)
        assert message.startswith("input 1: ")
        assert str(longest + 1) in message
        assert str(longest) in message
        lines = server.client.get("/metrics").text
        assert "llamatap_batch_prompts_count" not in lines
        assert server.states(**{**body, "input": [6] * longest})["shape"][0] == longest


def test_a_model_without_a_residual_stream(arch_models: Path) -> None:
    path = next(arch_models.glob("gemma3n*"), None) or next(arch_models.glob("deepseek4*"))
    with running([tiny_options(path, n_ctx=256)]) as server:
        server.error("/v1/hidden_states", 422, "model_error", model="tiny", input=[5])


@computes_with_nan
def test_states_that_are_no_numbers(tmp_path: Path) -> None:
    tiny = TinyLlama()
    tiny.weights["token_embd.weight"][10] = np.nan
    tiny.write(tmp_path / "nan.gguf")
    with running([tiny_options(tmp_path / "nan.gguf")]) as server:
        found = server.error("/v1/hidden_states", 422, "model_error", model="tiny", input=[9, 10])
        assert "NaN" in found
        assert server.states(input=[9, 11])["shape"] == [2, 64]


@pytest.mark.parametrize(
    ("content", "headers"),
    [
        (b"", {}),
        (b"{", {}),
        (b"[]", {}),
        (b"null", {}),
        (b'"text"', {}),
        (b'{"model": "tiny", "input": NaN}', {}),
        (b'{"model": "tiny", "input": "a", "layer": Infinity}', {}),
        (b'{"model": "tiny", "input": "\\ud800"}', {}),
        (b'{"model": "tiny", "input": "a", "layer": 1e400}', {}),
        (b'{"model": "tiny", "input": [99999999999999999999999]}', {}),
        (b"\xff\xfe", {}),
        (b"[" * 100_000, {}),
        (b'{"model": "tiny", "input": "a"}', {"Content-Type": "text/plain"}),
        (b'{"model": "tiny", "input": "a"}', {"Content-Type": "multipart/form-data"}),
    ],
)
def test_bodies_that_are_no_requests(server: Running, content: bytes, headers: dict[str, str]) -> None:
    headers = {"Content-Type": "application/json", **headers}
    response = server.client.post("/v1/hidden_states", content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_paths_and_methods(server: Running) -> None:
    assert server.client.get("/v1/nothing").json()["error"]["code"] == "not_found"
    wrong = server.client.get("/v1/hidden_states")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["code"] == "method_not_allowed"
