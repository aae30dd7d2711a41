"""Drafts that do not fit their target, files that are not drafts, and wrong arguments."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray
from support.drafting import EXACT, rewritten
from support.speculative_contexts import OF_PAIRS, SPECS, SpecUnderTest, eagle3_spec
from support.tiny import TinyLlama, TinyQwen35
from support.tiny_models import drafters, encoders, rigged

import llamatap as lt

F = rigged.cycle()


@dataclass
class Target:
    """A target of 4 layers, width 64 and 259 tokens, and a folder for what is to draft for it."""

    context: lt.Context
    path: Path
    folder: Path

    @property
    def draft(self) -> Path:
        return self.folder / "draft.gguf"


@pytest.fixture(scope="module")
def target_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TinyLlama().write(tmp_path_factory.mktemp("misfit") / "target.gguf")


@pytest.fixture
def target(target_file: Path, tmp_path: Path) -> Iterator[Target]:
    with lt.Model(target_file) as model, model.context(n_ctx=256, **EXACT) as context:
        yield Target(context, target_file, tmp_path)
        # After a refusal the target is unchanged.
        context.decode(lt.Batch.of([5, 6, 7]))
        with lt.SpeculativeContext(context, drafters.write_eagle3(tmp_path / "good.gguf")) as spec:
            assert spec.kind == "eagle3"


def eagle3_with(
    change: Callable[[dict[str, NDArray[Any]]], object], **options: Any
) -> Callable[[Target], Path]:
    """An EAGLE-3 file with changed tensors."""

    def write(target: Target) -> Path:
        drafters.write_eagle3(target.draft, **options)
        return rewritten(target.draft, target.folder / "changed.gguf", change)

    return write


def eagle3(**options: Any) -> Callable[[Target], Path]:
    return lambda target: drafters.write_eagle3(target.draft, **options)


def block(**options: Any) -> Callable[[Target], Path]:
    return lambda target: drafters.write_mtp_block(target.draft, n_layer=4, **options)


def d2t(change: Callable[[NDArray[np.int64]], object]) -> Callable[[Target], Path]:
    return eagle3_with(lambda tensors: change(tensors["d2t"]), n_draft_vocab=100)


def resized(name: str, rows: int) -> Callable[[Target], Path]:
    def change(tensors: dict[str, NDArray[Any]]) -> None:
        tensors[name] = np.resize(tensors[name], (rows, tensors[name].shape[1]))

    return eagle3_with(change)


def offsets(ids: NDArray[np.int64]) -> None:
    """d2t as checkpoints hold it: the offset that is added to the row's number."""
    ids -= np.arange(len(ids))


def setting(index: int, value: int) -> Callable[[NDArray[np.int64]], None]:
    def change(ids: NDArray[np.int64]) -> None:
        ids[index] = value

    return change


def with_keys(**keys: int) -> Callable[[Target], Path]:
    def write(target: Target) -> Path:
        drafters.write_eagle3(target.draft)
        named = {f"eagle3.{key.replace('__', '.')}": value for key, value in keys.items()}
        return rewritten(target.draft, target.folder / "changed.gguf", keys=named)

    return write


#: Files, and words of the error: what was expected and what was found.
MISFITS: dict[str, tuple[Callable[[Target], Path], str]] = {
    "states of another width": (eagle3(n_embd_target=48), r"144.*48.*64 wide"),
    "an inherited embedding of another width": (eagle3(n_embd=48, own_embedding=False), r"64.*48"),
    "an inherited head of another width": (eagle3(n_embd=48, own_head=False), r"64.*48"),
    "a layer beyond": (eagle3(target_layers=(1, 2, 5)), r"layer 5.*0\.\.4"),
    "a layer far beyond": (eagle3(target_layers=(1, 2, 2**31 - 1)), r"2147483647"),
    "a negative layer": (eagle3(target_layers=(-1, 2, 3)), r"layer -1.*0\.\.4"),
    "an inherited head with a d2t for another": (
        eagle3(own_head=False, n_draft_vocab=100),
        r"259 rows.*100",
    ),
    "states wider than the block": (with_keys(embedding_length_out=128), r"64 wide.*128"),
    "states narrower than the block": (with_keys(embedding_length_out=32), r"64 wide.*32"),
    "d2t of offsets": (d2t(offsets), r"offsets"),
    "d2t names a token twice": (d2t(lambda ids: setting(5, int(ids[4]))(ids)), r"twice"),
    "d2t names a token beyond": (d2t(setting(99, 259)), r"259"),
    "d2t names a token far beyond": (d2t(setting(99, 2**40)), r"1099511627776"),
    "d2t names a negative token": (d2t(setting(0, -1)), r"-1"),
    "d2t shorter than the head": (
        eagle3_with(lambda tensors: tensors.update(d2t=tensors["d2t"][:90].copy()), n_draft_vocab=100),
        r"90.*100",
    ),
    "a head of some rows without d2t": (
        eagle3_with(lambda tensors: tensors.pop("d2t"), n_draft_vocab=100),
        r"259.*100",
    ),
    "a head of more rows than tokens": (resized("output.weight", 300), r"259.*300"),
    "an embedding of too few rows": (resized("token_embd.weight", 200), r"200.*259"),
    "MTP of another vocabulary": (
        lambda target: rigged.write_rigged_mtp(target.draft, F, [F], trunk=False),
        r"64.*259",
    ),
    "EAGLE-3 of another vocabulary": (
        lambda target: rigged.write_rigged_eagle3(target.draft, F, F),
        r"64.*259",
    ),
    "a model of another vocabulary": (
        lambda target: rigged.write_rigged_model(target.draft, F),
        r"64.*259",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_draft_that_does_not_fit_says_what_was_expected_and_found(name: str, target: Target) -> None:
    write, words = MISFITS[name]
    # Some of these errors come from the engine itself.
    with pytest.raises((lt.InvalidInputError, lt.ModelLoadError), match=words):
        lt.SpeculativeContext(target.context, write(target))


def plus(*names: str, rows: int = 64) -> Callable[[Target], Path]:
    """An EAGLE-3 file with weights that no other one has."""
    return eagle3_with(lambda tensors: tensors.update({name: np.ones(rows, np.float32) for name in names}))


def told(name: str, value: bool | int) -> Callable[[Target], Path]:
    def write(target: Target) -> Path:
        drafters.write_eagle3(target.draft)
        return rewritten(target.draft, target.folder / "changed.gguf", keys={name: value})

    return write


FC_NORMS = tuple(f"fc_norm.{i}.weight" for i in range(3))

#: EAGLE-3 files with more than the engine's graph computes with: EAGLE-3.1's norms, and what other ways to
#: train or to store a drafter would leave there.
NOT_COMPUTED: dict[str, tuple[Callable[[Target], Path], tuple[str, ...]]] = {
    "fc_norm": (plus(*FC_NORMS), FC_NORMS),
    "norm_output": (plus("norm_output.weight"), ("norm_output.weight",)),
    "both": (plus("norm_output.weight", *FC_NORMS), ("norm_output.weight", *FC_NORMS)),
    "a setting": (told("eagle3.norm_output", True), ("eagle3.norm_output",)),
    "a setting that is a number": (told("eagle3.fc_norm", 3), ("eagle3.fc_norm",)),
    "a norm without its setting": (plus("enc.output_norm.weight", rows=192), ("enc.output_norm.weight",)),
    # The engine loads it, and multiplies nothing with it.
    "a scale": (plus("blk.0.attn_q.scale", rows=1), ("blk.0.attn_q.scale",)),
    "the scale of an input": (plus("blk.0.ffn_up.input_scale", rows=1), ("blk.0.ffn_up.input_scale",)),
    "a bias": (plus("blk.0.attn_q.bias"), ("blk.0.attn_q.bias",)),
}


@pytest.mark.sampled(7)
@pytest.mark.parametrize("name", NOT_COMPUTED)
def test_weights_that_the_engine_would_not_compute_with_are_refused_by_name(
    name: str, target: Target
) -> None:
    write, names = NOT_COMPUTED[name]
    path = write(target)
    for use in (
        lambda: lt.SpeculativeContext(target.context, path),
        lambda: lt.load_drafter(target.context, path),
        lambda: lt.Model(path),
    ):
        with pytest.raises(lt.ModelLoadError, match="graph does not compute with") as caught:
            use()
        assert all(one in str(caught.value) for one in names)
        assert "attn_norm" not in str(caught.value)
    assert names[0] in str(lt.probe(path).error)


@pytest.mark.parametrize("before_fc", [False, True])
def test_what_the_engine_computes_with_is_taken(before_fc: bool, target: Target) -> None:
    """A file with every optional weight, and a setting that is off."""
    drafters.write_eagle3(target.draft, norm_before_fc=before_fc, n_draft_vocab=100)
    path = rewritten(
        target.draft,
        target.folder / "changed.gguf",
        lambda tensors: tensors.update({"rope_freqs.weight": np.ones(8, np.float32)}),
        keys={"eagle3.norm_output": False},
    )
    names = {tensor.name for tensor in gguf.GGUFReader(path).tensors}
    assert len(names) == 16 + before_fc
    with lt.SpeculativeContext(target.context, path) as spec:
        assert spec.kind == "eagle3"


def without(name: str) -> Callable[[Target], Path]:
    return eagle3_with(lambda tensors: tensors.pop(name))


def d2t_of_int32(target: Target) -> Path:
    def change(tensors: dict[str, NDArray[Any]]) -> None:
        tensors["d2t"] = tensors["d2t"].astype(np.int32)

    return eagle3_with(change, n_draft_vocab=100)(target)


def garbage(target: Target, data: bytes) -> Path:
    target.draft.write_bytes(data)
    return target.draft


def cut_short(target: Target) -> Path:
    data = drafters.write_eagle3(target.draft).read_bytes()
    return garbage(target, data[: len(data) // 2])


def encoder(target: Target) -> Path:
    return encoders.bert().write(target.draft)


#: Files that no drafter can be made of.
BROKEN: dict[str, tuple[Callable[[Target], Path], type[Exception]]] = {
    "no file": (lambda target: target.folder / "missing.gguf", lt.ModelNotFoundError),
    "a folder": (lambda target: target.folder, lt.ModelLoadError),
    "empty": (lambda target: garbage(target, b""), lt.ModelLoadError),
    "garbage": (lambda target: garbage(target, b"GGUF" + bytes(range(256)) * 40), lt.ModelLoadError),
    "cut short": (cut_short, lt.ModelLoadError),
    "two layers": (eagle3(target_layers=(1, 2)), lt.ModelLoadError),
    "four layers": (eagle3(target_layers=(1, 2, 3, 4)), lt.ModelLoadError),
    "no fc": (without("fc.weight"), lt.ModelLoadError),
    "no norm of states": (without("blk.0.attn_norm_2.weight"), lt.ModelLoadError),
    "a block of another width": (resized("blk.0.ffn_gate.weight", 95), lt.ModelLoadError),
    "d2t of int32": (d2t_of_int32, lt.UnsupportedError),
    "an encoder": (encoder, lt.Error),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_file_that_is_no_draft_raises(name: str, target: Target) -> None:
    write, error = BROKEN[name]
    with pytest.raises(error) as caught:
        lt.SpeculativeContext(target.context, write(target))
    assert isinstance(caught.value, lt.Error)
    assert str(caught.value)


PRELUDE = """
import sys
import numpy as np
import llamatap as lt
target, draft = sys.argv[1:3]
model = lt.Model(target)
context = model.context(n_ctx=256)
"""

#: Uses of blocks that are no whole model, and the error that each must raise. Each has ended a process.
BLOCKS_ALONE: dict[str, str] = {
    "as a model": "lt.SpeculativeContext(context, draft, as_model=True)",
    "for a drafter with a model": "lt.ModelDrafter(context, draft)",
    "loaded without its blocks": "lt.SpeculativeContext(context, lt.Model(draft))",
    "a context of its own": "lt.Model(draft, load_mtp=True).context(n_ctx=256)",
    "a context without the blocks": "lt.Model(draft).context(n_ctx=256).decode(lt.Batch.of([5]))",
    "extraction": "lt.extract(lt.Model(draft), [5, 6], [1])",
    "a target": "lt.SpeculativeContext(lt.Model(draft, load_mtp=True).context(n_ctx=256), draft)",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("use", BLOCKS_ALONE)
def test_blocks_alone_are_no_model(use: str, target_file: Path, tmp_path: Path) -> None:
    """Each runs in its own process, which must not abort."""
    draft = drafters.write_mtp_block(tmp_path / "draft.gguf", n_layer=4)
    code = (
        f"{PRELUDE}\ntry:\n    {BLOCKS_ALONE[use]}\nexcept lt.Error as error:\n    print('refused:', error)\n"
    )
    command = [sys.executable, "-c", code, str(target_file), str(draft)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.startswith("refused:")


def test_a_model_loaded_without_its_blocks_says_how_to_load_them(tmp_path: Path) -> None:
    path = drafters.write_mimo2(tmp_path / "target.gguf")
    with lt.Model(path) as model, model.context(n_ctx=256, **EXACT) as context:
        spec = lt.SpeculativeContext(context, model, **EXACT)
        # As a whole model it is accepted.
        assert spec.kind == "model"
        with pytest.raises(lt.InvalidInputError, match="load_mtp=True"):
            lt.MtpDrafter(spec)


def test_blocks_of_another_width_or_none(tmp_path: Path) -> None:
    narrow = TinyLlama(n_embd=48, n_head=3, n_head_kv=3).write(tmp_path / "narrow.gguf")
    draft = drafters.write_mtp_block(tmp_path / "draft.gguf", n_layer=4)
    with (
        lt.Model(narrow) as model,
        model.context(n_ctx=256) as context,
        pytest.raises(lt.InvalidInputError, match=r"64.*48"),
    ):
        lt.SpeculativeContext(context, draft)
    without_blocks = drafters.write_mimo2(tmp_path / "none.gguf", n_nextn=0)
    with (
        lt.Model(without_blocks, load_mtp=True) as model,
        model.context(n_ctx=256) as context,
        pytest.raises(lt.InvalidInputError, match="kind"),
    ):
        lt.MtpDrafter(lt.SpeculativeContext(context, model))


def test_a_target_must_generate_text(tmp_path: Path) -> None:
    bert = encoders.bert().write(tmp_path / "bert.gguf")
    draft = drafters.write_eagle3(tmp_path / "draft.gguf")
    other = TinyLlama(causal=False).write(tmp_path / "other.gguf")
    for path in (bert, other):
        with (
            lt.Model(path) as model,
            model.context(n_ctx=256) as context,
            pytest.raises(lt.UnsupportedError, match="does not generate text"),
        ):
            lt.SpeculativeContext(context, draft)


def test_a_recurrent_model_cannot_draft(target: Target) -> None:
    path = TinyQwen35().write(target.draft)
    with pytest.raises(lt.UnsupportedError, match=r"qwen35.*back"):
        lt.SpeculativeContext(target.context, path)
    with pytest.raises(lt.UnsupportedError, match=r"qwen35.*back"):
        lt.ModelDrafter(target.context, path)


def test_a_block_is_no_language_model(target: Target) -> None:
    path = drafters.write_eagle3(target.draft)
    for call in (
        lambda: lt.SpeculativeContext(target.context, path, as_model=True),
        lambda: lt.ModelDrafter(target.context, path),
        lambda: lt.Model(path).context(n_ctx=256),
    ):
        with pytest.raises(lt.UnsupportedError, match="drafts for another"):
            call()


def test_wrong_makings_raise(target: Target) -> None:
    path = drafters.write_eagle3(target.draft)
    wrong: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((None, path), {}),
        ((target.path, path), {}),
        ((target.context, None), {}),
        ((target.context, 5), {}),
        ((target.context, target.context), {}),
    ]
    options: list[dict[str, Any]] = [
        {"n_seq_max": 0},
        {"n_seq_max": 257},
        {"n_seq_max": "2"},
        {"n_ctx": -1},
        {"n_ctx": 1.5},
        {"n_ctx": 2**31},
        {"n_ubatch": 0},
        {"n_threads": 0},
        {"n_threads": 513},
        {"type_k": "q6_K"},
        {"type_v": 5},
        {"flash_attn": "off"},
        {"as_model": None},
        {"n_gpu_layers": "1"},
    ]
    wrong += [((target.context, path), one) for one in options]
    for args, given in wrong:
        with pytest.raises(lt.InvalidInputError):
            lt.SpeculativeContext(*args, **given)
    with (
        lt.Model(target.path, vocab_only=True) as model,
        pytest.raises(lt.UnsupportedError, match="without its weights"),
    ):
        lt.SpeculativeContext(target.context, model)


@pytest.mark.parametrize("what", ["context", "model"])
def test_what_is_closed_makes_no_draft_context(what: str, target: Target) -> None:
    path = drafters.write_eagle3(target.draft)
    with lt.Model(target.path) as model, model.context(n_ctx=256) as context, lt.Model(path) as draft:
        (context if what == "context" else draft).close()
        with pytest.raises(lt.ClosedError):
            lt.SpeculativeContext(context, draft)


def rows(*shape: int, dtype: Any = np.float32, fill: float = 1.0) -> Any:
    return np.full(shape, fill, dtype)


def decode(
    tokens: Any = (5, 6), states: Any = "right", positions: Any = (2, 3), *args: Any, **options: Any
) -> Callable[[SpecUnderTest], Any]:
    def call(tested: SpecUnderTest) -> Any:
        given = rows(len(tokens), tested.spec.n_state) if isinstance(states, str) else states
        return tested.spec.decode(tokens, given, positions, *args, **options)

    return call


NAN, INF = float("nan"), float("inf")

#: Wrong calls of a context with two pairs in sequence 0.
INVALID: dict[str, Callable[[SpecUnderTest], Any]] = {
    "encode: another width": lambda w: w.spec.encode(rows(3, 65)),
    "encode: float64": lambda w: w.spec.encode(rows(3, w.spec.n_features, dtype=np.float64)),
    "encode: float16": lambda w: w.spec.encode(rows(3, w.spec.n_features, dtype=np.float16)),
    "encode: one row": lambda w: w.spec.encode(rows(w.spec.n_features)),
    "encode: three dimensions": lambda w: w.spec.encode(rows(1, 3, w.spec.n_features)),
    "encode: NaN": lambda w: w.spec.encode(rows(3, w.spec.n_features, fill=NAN)),
    "encode: infinity": lambda w: w.spec.encode(rows(3, w.spec.n_features, fill=-INF)),
    "encode: None": lambda w: w.spec.encode(None),  # type: ignore[arg-type]
    "encode: ragged": lambda w: w.spec.encode([[1.0], [1.0, 2.0]]),
    "encode: text": lambda w: w.spec.encode("abc"),
    "decode: nothing, of another width": decode((), rows(0, 65), ()),
    "decode: no states": decode(states=None),
    "decode: another width": decode(states=rows(2, 65)),
    "decode: too few states": decode(states=rows(1, 64)),
    "decode: float64": decode(states=rows(2, 64, dtype=np.float64)),
    "decode: lists": decode(states=[[1.0] * 64] * 2),
    "decode: ragged": decode(states=[[1.0], [1.0, 2.0]]),
    "decode: NaN": decode(states=rows(2, 64, fill=NAN)),
    "decode: infinity": decode(states=rows(2, 64, fill=INF)),
    "decode: a token beyond": decode((5, 259)),
    "decode: a negative token": decode((5, -1)),
    "decode: a negative token of 32 bits": decode(np.array([5, -1], np.int32)),
    "decode: a token beyond 32 bits": decode((5, 2**40)),
    "decode: tokens of fractions": decode((5.0, 6.0)),
    "decode: too few positions": decode(positions=(2,)),
    "decode: a gap": decode(positions=(2, 4)),
    "decode: positions that are there": decode(positions=(0, 1)),
    "decode: positions too far": decode(positions=(3, 4)),
    "decode: a position twice": decode(positions=(2, 2)),
    "decode: a negative position": decode((5,), positions=(-1,), seqs=1),
    "decode: a negative position of 32 bits": decode((5,), None, np.array([-1], np.int32), 1),
    "decode: positions of fractions": decode(positions=(2.0, 3.0)),
    "decode: a sequence beyond": decode((5,), positions=(0,), seqs=4),
    "decode: a negative sequence": decode((5,), positions=(0,), seqs=-1),
    "decode: a bool for a sequence": decode((5,), positions=(0,), seqs=True),
    "decode: too few sequences": decode(seqs=[0]),
    "decode: one sequence wrong": decode(positions=(2, 0), seqs=[0, 4]),
    "decode: sequences of fractions": decode(seqs=[0.0, 0.0]),
    "decode: no sequences": decode(seqs=None),
    "decode: too few outputs": decode(outputs=[True]),
    "decode: outputs of numbers": decode(outputs=[1, 0]),
    "decode: no outputs": decode(outputs=None),
    "decode: top_k 0": decode(top_k=0),
    "decode: top_k negative": decode(top_k=-5),
    "decode: top_k too large": decode(top_k=260),
    "decode: top_k a fraction": decode(top_k=1.0),
    "decode: logits a number": decode(logits=1),
    "decode: head beyond": decode(head=9),
    "decode: head negative": decode(head=-1),
    "decode: head a fraction": decode(head=0.0),
}


@pytest.fixture(scope="module", params=OF_PAIRS)
def tested(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SpecUnderTest]:
    folder = tmp_path_factory.mktemp("all_tested")
    make = (
        (lambda: eagle3_spec(folder)) if request.param == "eagle3" else lambda: SPECS[request.param](folder)
    )
    with make() as tested:
        yield tested


@pytest.mark.parametrize("name", INVALID)
def test_wrong_arguments_raise_and_change_nothing(tested: SpecUnderTest, name: str) -> None:
    spec = tested.spec
    spec.memory.clear()
    spec.decode([5, 6], rows(2, spec.n_state), [0, 1])
    with pytest.raises(lt.InvalidInputError) as caught:
        INVALID[name](tested)
    assert str(caught.value)
    assert [spec.memory.last(seq) for seq in range(4)] == [1, -1, -1, -1]
    found = spec.decode([7], rows(1, spec.n_state), [2], logits=True)
    expected = tested.formula([5, 6, 7], rows(3, spec.n_state), range(3), 0)
    tested.check(found, expected[0][2:], expected[1][2:])


def test_d2t_as_it_is_written(tmp_path: Path) -> None:
    """The d2t that the tests above change is in the file in the first place."""
    path = drafters.write_eagle3(tmp_path / "draft.gguf", n_draft_vocab=100)
    copy = rewritten(path, tmp_path / "copy.gguf", lambda tensors: None)
    tensors = [{t.name: np.array(t.data) for t in gguf.GGUFReader(file).tensors} for file in (path, copy)]
    assert tensors[0].keys() == tensors[1].keys()
    assert tensors[0]["d2t"].dtype == np.int64
    assert all(np.array_equal(values, tensors[1][name]) for name, values in tensors[0].items())


@pytest.mark.parametrize("n_rotated", [0, 1, 15, 18, 2**31])
def test_heads_that_cannot_be_rotated_so_far(n_rotated: int, target: Target) -> None:
    """The engine would abort in the first decode, or never end it."""
    path = with_keys(rope__dimension_count=n_rotated)(target)
    with pytest.raises(lt.ModelLoadError, match=rf"rope.dimension_count must be .* 2\.\.16, .* {n_rotated}"):
        lt.SpeculativeContext(target.context, path)
