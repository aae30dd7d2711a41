"""Checks of every architecture, on tiny random models.

The engine's own program writes most models; support/tiny_models writes those that it cannot.

None of the checks knows how a layer is found: they look at states, weights and logits from outside.

python tests/support/architecture_checks.py MODEL SCRATCH    prints what the snapshot holds of one file
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from support.numerics import EXACT as EXACT_ANYWHERE
from support.paths import DATA, ROOT, TESTS

import llamatap as lt
from llamatap._native import native_of

Array = NDArray[np.float64]

WRITER = ROOT / "build" / "archs" / "test-llama-archs"  # built by `make test`
SNAPSHOT_PATH = DATA / "architectures.json"

#: These models are too small for threads.
EXACT = {**EXACT_ANYWHERE, "n_threads": 1}
#: Bound on the distance from one way to another, relative to the largest value of the layer. Most stay below
#: 1e-5; where GELU comes from the engine's table of float16 values, neighbouring entries are 5e-4 apart.
BOUND = 2e-4
LENGTHS = (7, 33, 20)
#: Blocks that run several times have no weights of their own to change.
SHARED_BLOCKS = {"hrm_text"}
#: Tensors that an empty block keeps, since something is divided by them or by a result of them.
DIVISORS = (".act.scales",)
GATE = ".ffn_gate_inp_shexp.weight"


@dataclass
class Findings:
    """Results of the checks of one model."""

    arch: str
    nodes: list[str]  # that give H_0..H_n and norm(H_n)
    cropped: list[bool]  # which of them the engine crops to the outputs
    hooked: list[bool]  # which of them its own hooks give, too
    first: str  # what H_0 is
    residual: bool  # H_{i+1} = H_i + what block i adds: equal when its weights are zero
    norm: str
    head: str


def distance(found: NDArray[np.generic], expected: NDArray[np.generic]) -> float:
    """The largest difference divided by the largest value, layer by layer where there are layers."""
    a, b = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    assert a.shape == b.shape
    axes = (0, 2) if a.ndim == 3 else None
    ratios = np.abs(a - b).max(axis=axes) / np.abs(b).max(axis=axes)
    return float(np.max(ratios))


def tokens_for(model: lt.Model, count: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(0).integers(0, model.n_vocab, count)]


def all_layers(model: lt.Model) -> list[lt.LayerId]:
    pre_norm: list[lt.LayerId] = [*range(model.n_layer + 1)]
    return [*pre_norm, "norm"] if model.layer_map.has_norm else pre_norm


class Weights:
    """The float32 tensors of a GGUF file by name."""

    def __init__(self, path: Path, mode: Any = "r") -> None:
        self.reader = gguf.GGUFReader(path, mode)
        self.tensors = {tensor.name: tensor for tensor in self.reader.tensors}

    def get(self, name: str) -> Array | None:
        tensor = self.tensors.get(name)
        if tensor is None:
            return None
        return np.asarray(gguf.dequantize(tensor.data, tensor.tensor_type), np.float64)

    def scale_block(self, block: int, factor: float) -> None:
        kept: tuple[str, ...] = DIVISORS
        if any(name.endswith(GATE) for name in self.tensors):
            kept += (GATE, "_norm.weight")
        for name, tensor in self.tensors.items():
            of_block = name.startswith((f"blk.{block}.", f"enc.blk.{block}."))
            if not of_block or (factor == 0 and name.endswith(kept)):
                continue
            assert tensor.tensor_type == gguf.GGMLQuantizationType.F32, name
            tensor.data[:] *= np.float32(factor)
        self.reader.data.flush()


def check_every_way(model: lt.Model, whole: NDArray[Any], tokens: list[int]) -> None:
    """Check that rows are the same in one piece and in chunks, alone and batched, extracted and tapped."""
    layers = all_layers(model)
    assert np.isfinite(whole).all()
    prompts = [tokens[:length] for length in LENGTHS]
    # Without a memory all tokens are computed at once: there are no pieces.
    if model.layer_map.has_memory:
        expected = [whole[:length] for length in LENGTHS]
        for n_ubatch in (16, 1):
            with lt.Extractor(model, n_ubatch=n_ubatch, **EXACT) as extractor:
                found = extractor(tokens, layers).array
                assert distance(found, whole) < BOUND, f"in chunks of {n_ubatch}"
    else:
        with lt.Extractor(model, **EXACT) as extractor:
            expected = [extractor(prompt, layers).array for prompt in prompts]
    with lt.Extractor(model, **EXACT) as extractor:
        for states, rows in zip(extractor(prompts, layers), expected, strict=True):
            assert distance(states.array, rows) < BOUND, "in a batch"
    if not native_of(model).batches_sequences:
        return
    for unified in (True, False):
        # LongRoPE computes otherwise where a sequence has room for more than the original context.
        n_ctx = 256 if unified else 768
        context = model.context(n_ctx=n_ctx, n_seq_max=3, kv_unified=unified, **EXACT)
        batch = lt.Batch()
        rows_of: list[list[int]] = [[], [], []]
        for position in range(max(LENGTHS)):
            for seq, prompt in enumerate(prompts):
                if position < len(prompt):
                    rows_of[seq].append(len(batch))
                    batch.add(prompt[position], position, seq, output=position == len(prompt) - 1)
        with context, context.tap(layers, rows="all") as tap:
            context.decode(batch)
            for seq, rows in enumerate(expected):
                found = tap.states.array[rows_of[seq]]
                assert distance(found, rows) < BOUND, f"tapped in a batch, kv_unified={unified}"


def check_hooks(model: lt.Model, whole: NDArray[Any], tokens: list[int]) -> list[bool]:
    """Check that hooks give the callback's bits, and the same rows in a batch. Returns which exist."""
    layer_map = model.layer_map
    slots = [slot for slot, hooked in enumerate(layer_map.hooked) if hooked]
    if not slots:
        return layer_map.hooked

    def tapped(batch: lt.Batch, way: str, **options: Any) -> NDArray[Any]:
        with model.context(n_ctx=256, n_ubatch=16, **options, **EXACT) as context:
            # The second decode finds the hooks as the first one left them.
            for _ in range(2):
                context.memory.clear()
                states, _tokens = native_of(context).decode_tapped(
                    layer_map, slots, "float32", False, batch, way
                )
                context.decode(lt.Batch.of([tokens[0]], pos0=len(tokens)))
            return states

    one = lt.Batch.of(tokens)
    by_hooks = tapped(one, "hooks")
    assert np.array_equal(by_hooks, tapped(one, "callback")), "hooks and callback differ"
    if not native_of(model).batches_sequences:
        return layer_map.hooked
    several = lt.Batch()
    rows_of: list[list[int]] = [[], []]
    for position in range(len(tokens)):
        for seq, length in enumerate((len(tokens), 7)):
            if position < length:
                rows_of[seq].append(len(several))
                several.add(tokens[position], position, seq)
    states = tapped(several, "hooks", n_seq_max=2)
    for rows in rows_of:
        assert distance(states[rows], whole[: len(rows), slots]) < BOUND, "hooks in a batch"
    return layer_map.hooked


def check_copies(model: lt.Model, tokens: list[int]) -> None:
    """Check that copies in the graph give the callback's bits and leave the logits as they are, tapped and
    extracted, all layers and up to one in the middle."""
    layer_map = model.layer_map
    n = model.n_layer
    every = list(range(n + 1 + layer_map.has_norm))

    def found(way: str, slots: list[int]) -> list[NDArray[Any]]:
        n_ubatch = 256 if layer_map.at_once else 16
        with model.context(n_ctx=256, n_ubatch=n_ubatch, n_outputs_max=256, **EXACT) as context:
            native, results = native_of(context), []
            for piece in (tokens, tokens[:5]):
                out = np.zeros(len(piece) * len(slots) * model.n_embd * 4, np.uint8)
                job = (np.array(piece, np.int32), 0, len(piece), "none", out)
                try:
                    native.extract(layer_map, slots, "float32", [job], None, way)
                except lt.EngineError as error:
                    # Its graph cannot be built without outputs (chameleon).
                    return [np.array(str(error))]
                batch = lt.Batch.of(piece)
                states, _ = native.decode_tapped(layer_map, slots, "float32", False, batch, way)
                results += [out, states]
                with contextlib.suppress(lt.UnsupportedError):  # without an output head
                    results.append(context.logits().copy())
                context.memory.clear()
            return results

    for slots in (every, [n // 2]):
        if not layer_map.has_memory and slots != every:
            continue
        for ours, theirs in zip(found("copies", slots), found("callback", slots), strict=True):
            assert np.array_equal(ours, theirs), f"copies and callback differ, slots {slots}"


def check_blocks(path: Path, scratch: Path, whole: NDArray[Any], tokens: list[int]) -> bool:
    """Check that a block changes only the states behind it. Returns whether an empty one adds nothing."""
    with lt.Model(path) as model:
        n_layer = model.n_layer
    residual = True
    for block in range(n_layer):
        for factor in (1.25, 0.0):
            shutil.copy(path, scratch)
            Weights(scratch, "r+").scale_block(block, factor)
            with lt.Model(scratch) as model, lt.Extractor(model, **EXACT) as extractor:
                changed = extractor(tokens, all_layers(model)).array
            before = slice(0, block + 1)
            assert np.array_equal(changed[:, before], whole[:, before]), (
                f"block {block} changed states before it"
            )
            assert not np.allclose(changed[:, block + 1], whole[:, block + 1], rtol=1e-3), (
                f"block {block} did not change H_{block + 1}"
            )
            if factor == 0:
                residual = residual and np.array_equal(changed[:, block + 1], changed[:, block])
    return residual


def rms_norm(x: Array, eps: float) -> Array:
    result: Array = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)
    return result


def layer_norm(x: Array, eps: float) -> Array:
    return rms_norm(x - x.mean(axis=-1, keepdims=True), eps)


def _first(candidates: dict[str, Array], found: NDArray[Any], bound: float = 1e-5) -> str | None:
    for name, values in candidates.items():
        if values.shape == found.shape and distance(found, values) < bound:
            return name
    return None


def what_enters(model: lt.Model, weights: Weights, first: NDArray[Any], tokens: list[int]) -> str:
    """Name of the formula that gives H_0, computed in NumPy."""
    rows = model.token_embeddings(tokens).astype(np.float64)
    candidates = {"embedding": rows}
    sum_ = "embedding"
    types = weights.get("token_types.weight")
    if types is not None:
        rows = rows + types[0]
        sum_ += " + token type"
    scale = float((first * rows).sum() / (rows * rows).sum())
    candidates["embedding, scaled"] = rows * scale
    positions = weights.get("position_embd.weight")
    if positions is not None:
        rows = rows + positions[: len(tokens)]
        sum_ += " + position"
    candidates[sum_] = rows
    gain, shift = weights.get("token_embd_norm.weight"), weights.get("token_embd_norm.bias")
    for name, normed in norms_of(model, rows, gain, shift).items():
        candidates[f"{name} of the {sum_}"] = normed
    turned_on = model.metadata.get(f"{model.arch}.adapters.token_ids_activate", [])
    if turned_on:
        instead = dict(
            zip(turned_on, model.metadata[f"{model.arch}.adapters.token_ids_substitute"], strict=True)
        )
        replaced = model.token_embeddings([instead.get(token, token) for token in tokens])
        candidates["embedding, tokens of adapters replaced"] = replaced.astype(np.float64)
    start = weights.get("hrm.z_l_init")
    if start is not None:
        factor = float(((first - start) * rows).sum() / (rows * rows).sum())
        candidates["embedding, scaled, + initial low state"] = rows * factor + start
    return _first(candidates, first) or "?"


def norms_of(model: lt.Model, x: Array, gain: Array | None, shift: Array | None) -> dict[str, Array]:
    """Both kinds of norm of `x`, with the eps that the file gives each of them."""
    result = {}
    for name, norm, key in (
        ("RMS norm", rms_norm, "layer_norm_rms_epsilon"),
        ("layer norm", layer_norm, "layer_norm_epsilon"),
    ):
        eps = float(str(model.metadata.get(f"{model.arch}.attention.{key}", 1e-6)))
        result[name] = norm(x, eps) * (1.0 if gain is None else gain) + (0.0 if shift is None else shift)
    return result


def what_leaves(
    model: lt.Model, weights: Weights, whole: NDArray[Any], logits: NDArray[Any] | None
) -> tuple[str, str]:
    """norm(H_n) from H_n, and the logits from that, by NumPy and the file's weights; "none" without them."""
    if not model.layer_map.has_norm:
        assert logits is None
        return "none", "none"
    last, normed = whole[:, -2].astype(np.float64), whole[:, -1].astype(np.float64)
    gain, shift = weights.get("output_norm.weight"), weights.get("output_norm.bias")
    if gain is None:
        gain = weights.get("enc.output_norm.weight")
    if gain is None and model.arch.startswith("lfm2"):
        gain = weights.get("token_embd_norm.weight")  # that is its output norm
    norm = _first(norms_of(model, last, gain, shift), normed) or "?"
    if logits is None:
        return norm, "none"

    matrix = weights.get("output.weight")
    if matrix is None:
        matrix = weights.get("token_embd.weight")
    assert matrix is not None
    plain = normed @ matrix.T
    heads = {"matmul": plain}
    bias = weights.get("output.bias")
    if bias is not None:
        heads["matmul + bias"] = plain + bias
    scale = float((plain * logits).sum() / (plain * plain).sum())
    heads["matmul, scaled"] = plain * scale
    hidden = logits == np.finfo(np.float32).min
    if hidden.any():
        logits, heads = logits[~hidden], {"matmul, some hidden": plain[~hidden]}
    cap = model.metadata.get(f"{model.arch}.final_logit_softcapping")
    if cap:
        heads["matmul, soft cap"] = np.tanh(plain / float(str(cap))) * float(str(cap))
    return norm, _first(heads, logits) or "?"


def findings(path: Path, scratch: Path) -> Findings:
    """All checks of one file. Raises AssertionError, or UnsupportedError for a model without one stream."""
    with lt.Model(path) as model:
        layers = all_layers(model)
        nodes = model.layer_map.nodes
        tokens = tokens_for(model, 40)
        with lt.Extractor(model, **EXACT) as extractor:
            whole = extractor(tokens, layers).array
        check_every_way(model, whole, tokens)
        hooked = check_hooks(model, whole, tokens)
        check_copies(model, tokens)
        with model.context(n_ctx=256, **EXACT) as context, context.tap(layers) as tap:
            batch = lt.Batch()
            for position, token in enumerate(tokens):
                batch.add(token, position, output=True)
            context.decode(batch)
            assert distance(tap.states.array, whole) < BOUND, "tapped with all logits"
            try:
                logits = np.stack([context.logits(row) for row in range(len(tokens))])
            except lt.UnsupportedError:
                logits = None
        weights = Weights(path)
        first = what_enters(model, weights, whole[:, 0], tokens)
        norm, head = what_leaves(model, weights, whole, logits)
        arch = model.arch
    residual = arch not in SHARED_BLOCKS and check_blocks(path, scratch, whole, tokens)
    return Findings(
        arch,
        [name for name, _ in nodes],
        [cropped for _, cropped in nodes],
        hooked,
        first,
        residual,
        norm,
        head,
    )


@contextmanager
def written_models() -> Iterator[Path]:
    """A folder of the engine's tiny models, for as long as it is needed: they take 0.9 GB."""
    with tempfile.TemporaryDirectory(prefix="llamatap-archs-") as folder:
        command = [str(WRITER), "-o", folder, "-s", "1"]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        yield Path(folder)


def entry(path: Path, scratch: Path) -> dict[str, Any]:
    """The snapshot's entry for one file."""
    try:
        return asdict(findings(path, scratch))
    except lt.UnsupportedError as error:
        return {"unsupported": str(error)}
    except lt.ModelLoadError as error:
        return {"not loaded": str(error).replace(f"cannot load {path}: ", "")}


def entry_of_child(path: Path, scratch: Path) -> dict[str, Any]:
    """The same, computed in a child process, since the engine may abort it."""
    command = [
        sys.executable,
        "-m",
        "support.architecture_checks",
        str(path.resolve()),
        str(scratch.resolve()),
    ]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{path.name}: exit status {done.returncode}: {done.stderr[-2000:]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


if __name__ == "__main__":
    print(json.dumps(entry(Path(sys.argv[1]), Path(sys.argv[2]))))
