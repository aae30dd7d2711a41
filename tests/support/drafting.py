"""Random drafters beside their targets, their oracles, and a hand-written draft loop."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
from numpy.typing import NDArray
from support.numerics import EXACT as EXACT_ANYWHERE
from support.tiny import TinyGemma3, TinyLlama, copy_keys
from support.tiny_models import drafters
from support.tiny_models.block_drafters import write_dflash
from support.tiny_models.qwen35 import Qwen35WithMtp

import llamatap as lt
from reference import decoder, dflash, eagle3, mtp, mtp_qwen35

#: Models as small as these gain nothing from threads, which wait for each other by spinning.
EXACT: dict[str, Any] = {**EXACT_ANYWHERE, "n_threads": 1}

#: Text and number of tokens -> the expected draft and its probabilities.
Oracle: TypeAlias = "Callable[[Sequence[int], int], tuple[list[int], NDArray[np.float64]]]"
#: </s>, with which a draft ends.
END = 2
#: (token, position, sequence)
Entry: TypeAlias = "tuple[int, int, int]"


@dataclass(frozen=True)
class Pair:
    """A target and a drafter for it.

    :param draft: its file; None: blocks in the target's own.
    """

    target: Path
    draft: Path | None
    kind: str
    oracle: Oracle

    def __post_init__(self) -> None:
        # Oracles are slow, and tests ask for the same texts repeatedly.
        known = functools.cache(self.oracle)
        object.__setattr__(self, "oracle", lambda text, n: known(tuple(text), n))


def states_of(tiny: TinyLlama, tokens: Sequence[int]) -> NDArray[np.float64]:
    """H_0..H_n of a text, (n + 1, tokens, width)."""
    return decoder.forward(tiny.shape(), tiny.weights, tiny.entering(np.array(tokens, np.int32)))[0]


def eagle3_oracle(tiny: TinyLlama, weights: eagle3.Weights) -> Oracle:
    def draft(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        states = states_of(tiny, text[:-1])
        features = np.concatenate([states[layer] for layer in weights.target_layers], axis=1)
        return eagle3.draft(text, features, weights, n)

    return draft


def greedy_oracle(logits_after: Callable[[Sequence[int]], NDArray[np.float64]]) -> Oracle:
    """The oracle of a language model that drafts its own greedy continuation."""

    def draft(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        found = list(text)
        probabilities = []
        for _ in range(n):
            logits = logits_after(found)
            found.append(int(logits.argmax()))
            probabilities.append(eagle3.softmax(logits[None])[0].max())
        return found[len(text) :], np.array(probabilities)

    return draft


def _eagle3(folder: Path, **options: Any) -> Pair:
    tiny = TinyLlama()
    target = tiny.write(folder / "target.gguf")
    path = drafters.write_eagle3(folder / "draft.gguf", **options)
    return Pair(target, path, "eagle3", eagle3_oracle(tiny, eagle3.Weights.read(path, target)))


def _mtp(folder: Path, **options: Any) -> Pair:
    path = drafters.write_mimo2(folder / "target.gguf", **options)
    weights = mtp.Weights.read(path)

    def oracle(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        return mtp.draft(text, mtp.forward(text[:-1], weights)[0][-1], weights, n)

    return Pair(path, None, "mtp", oracle)


def _mtp_block(folder: Path, **options: Any) -> Pair:
    tiny = TinyLlama()
    path = drafters.write_mtp_block(folder / "draft.gguf", n_layer=tiny.n_layer, **options)
    weights = mtp.Weights.read(path)

    def oracle(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        return mtp.draft(text, states_of(tiny, text[:-1])[-1], weights, n)

    return Pair(tiny.write(folder / "target.gguf"), path, "mtp", oracle)


def _qwen35_block(folder: Path) -> Pair:
    tiny, block = TinyLlama(), Qwen35WithMtp(trunk=False)
    weights = block.weights

    def oracle(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        entering = tiny.entering(np.array(text[:-1], np.int32))
        normed = decoder.forward(tiny.shape(), tiny.weights, entering)[1]
        return mtp_qwen35.draft(text, normed, weights, block.shape(), n)

    return Pair(tiny.write(folder / "target.gguf"), block.write(folder / "draft.gguf"), "mtp", oracle)


def _dflash(folder: Path, **options: Any) -> Pair:
    tiny = TinyLlama()
    target = tiny.write(folder / "target.gguf")
    path = write_dflash(folder / "draft.gguf", block_size=7, **options)
    weights = dflash.Weights.read(path, target)

    def oracle(text: Sequence[int], n: int) -> tuple[list[int], NDArray[np.float64]]:
        states = states_of(tiny, text[:-1])
        features = np.concatenate([states[layer] for layer in (1, 2, 3)], axis=1)
        tokens, probabilities = dflash.draft(text, features, weights, n)
        return tokens, np.array(probabilities)

    return Pair(target, path, "dflash", oracle)


def _model(folder: Path, draft: TinyLlama) -> Pair:
    def logits_after(text: Sequence[int]) -> NDArray[np.float64]:
        entering = draft.entering(np.array(text, np.int32))
        logits: NDArray[np.float64] = decoder.forward(draft.shape(), draft.weights, entering)[2][-1]
        return logits

    target = TinyLlama().write(folder / "target.gguf")
    return Pair(target, draft.write(folder / "draft.gguf"), "model", greedy_oracle(logits_after))


def _mimo2_model(folder: Path) -> Pair:
    """A whole model with MTP blocks, taken as a language model."""
    path = drafters.write_mimo2(folder / "draft.gguf", window=8)
    weights = mtp.Weights.read(path)
    oracle = greedy_oracle(lambda text: mtp.forward(text, weights)[1][-1])
    return Pair(TinyLlama().write(folder / "target.gguf"), path, "model", oracle)


PAIRS: dict[str, Callable[[Path], Pair]] = {
    "eagle3": _eagle3,
    "eagle3 d2t": lambda folder: _eagle3(folder, n_draft_vocab=100, norm_before_residual=True),
    "eagle3 inherited": lambda folder: _eagle3(folder, own_embedding=False, own_head=False),
    "eagle3 narrow": lambda folder: _eagle3(folder, n_embd=48, norm_before_fc=True, target_layers=(0, 2, 4)),
    "mtp": _mtp,
    "mtp window": lambda folder: _mtp(folder, n_layer=2, window=8),
    "mtp 3 heads": lambda folder: _mtp(folder, n_nextn=3),
    "mtp 3 heads window": lambda folder: _mtp(folder, n_nextn=3, window=8),
    "mtp block": _mtp_block,
    "mtp block 3 heads": lambda folder: _mtp_block(folder, n_nextn=3, own_head=True, own_embedding=True),
    "model": lambda folder: _model(folder, TinyLlama(seed=5, n_layer=2)),
    "model window": lambda folder: _model(folder, TinyGemma3(seed=6)),
    "model mimo2": _mimo2_model,
    "mtp block of qwen35": _qwen35_block,
    "dflash": _dflash,
    "dflash causal": lambda folder: _dflash(folder, causal=True, own_embedding=False, own_head=False),
    "dspark": lambda folder: _dflash(folder, markov=8, n_draft_vocab=100),
    "dspark causal": lambda folder: _dflash(folder, markov=8, causal=True, anchor=False),
}
#: One of each way of drafting.
EACH = ("eagle3", "mtp", "mtp 3 heads", "model", "dflash", "dspark")


def add(batch: lt.Batch, entries: Iterable[Entry]) -> lt.Batch:
    for token, position, seq in entries:
        batch.add(token, position, seq)
    return batch


class Loop:
    """A hand-written draft loop; the target has decoded all but the last token of each text."""

    def __init__(self, context: lt.Context, drafter: lt.Drafter) -> None:
        self.context = context
        self.drafter = drafter
        self.texts: dict[int, list[int]] = {}

    def feed(self, entries: Iterable[Entry]) -> None:
        """Decode a batch of these entries and show it to the drafter."""
        self.show(add(lt.Batch(), entries))

    def show(self, batch: lt.Batch) -> None:
        if not self.drafter.target_layers:
            self.context.decode(batch)
            self.drafter.process(batch)
            return
        with self.context.tap(layers=self.drafter.target_layers) as tap:
            self.context.decode(batch)
        self.drafter.process(batch, tap.states)

    def start(self, texts: Mapping[int, Sequence[int]]) -> None:
        """Begin sequences with these texts, in one batch in which they take turns."""
        self.texts |= {seq: list(text) for seq, text in texts.items()}
        entries = [(text[at], at, seq) for seq, text in texts.items() for at in range(len(text) - 1)]
        self.feed(sorted(entries, key=lambda entry: entry[1]))

    def requests(self, seqs: Iterable[int] | None = None, n: int = 4) -> dict[int, lt.DraftRequest]:
        return {
            seq: lt.DraftRequest(self.texts[seq][-1], len(self.texts[seq]) - 1, n, seed=seq)
            for seq in (self.texts if seqs is None else seqs)
        }

    def draft(self, seqs: Iterable[int] | None = None, n: int = 4) -> dict[int, lt.Draft]:
        return dict(self.drafter.draft(self.requests(seqs, n)))

    def verify(self, drafts: Mapping[int, lt.Draft], rng: np.random.Generator) -> None:
        """Accept a random number of drafted tokens, then go on with a random token, as some target would."""
        entries = []
        for seq, draft in drafts.items():
            text = self.texts[seq]
            entries += [
                (token, at, seq) for at, token in enumerate([text[-1], *draft.tokens.tolist()], len(text) - 1)
            ]
        self.feed(entries)
        for seq, draft in drafts.items():
            text = self.texts[seq]
            accepted = int(rng.integers(0, len(draft.tokens) + 1))
            self.drafter.accept(seq, accepted)
            self.context.memory.remove(seq, len(text) + accepted)
            text += draft.tokens.tolist()[:accepted]
            text.append(int(rng.integers(3, self.context.model.n_vocab)))

    def reset(self, seq: int) -> None:
        self.context.memory.remove(seq)
        self.drafter.reset(seq)
        del self.texts[seq]


DRAFTERS: dict[str, Callable[..., lt.Drafter]] = {
    "eagle3": lt.Eagle3Drafter,
    "mtp": lt.MtpDrafter,
    "dflash": lt.DFlashDrafter,
    "model": lambda spec, **options: lt.ModelDrafter(spec.target, spec, **options),
}


@contextmanager
def opened(
    pair: Pair,
    *,
    n_seq_max: int = 1,
    n_ctx: int = 1024,
    draft_ctx: int = 0,
    n_ubatch: int = 128,
    kv_unified: bool = True,
    **options: Any,
) -> Iterator[Loop]:
    """An empty loop on a pair of models.

    :param draft_ctx: n_ctx of the draft; 0 for the target's.
    :param kv_unified: of the target; the draft's follows where it can.
    :param options: of the drafter.
    """
    with (
        lt.Model(pair.target, load_mtp=True) as model,
        model.context(
            n_ctx=n_ctx, n_ubatch=n_ubatch, n_seq_max=n_seq_max, kv_unified=kv_unified, **EXACT
        ) as context,
        lt.SpeculativeContext(
            context,
            pair.draft or model,
            n_ctx=draft_ctx,
            n_ubatch=n_ubatch,
            as_model=pair.kind == "model",
            **EXACT,
        ) as spec,
    ):
        yield Loop(context, DRAFTERS[pair.kind](spec, **options))


def random_text(rng: np.random.Generator, length: int, n_vocab: int = drafters.N_VOCAB) -> list[int]:
    found: list[int] = rng.integers(3, n_vocab, length).tolist()
    return found


def assert_drafted(draft: lt.Draft | None, oracle: Oracle, text: Sequence[int], n: int) -> None:
    """Assert that the draft and its probabilities are the oracle's."""
    tokens, probabilities = oracle(text, n)
    if END in tokens:
        tokens = tokens[: tokens.index(END) + 1]
    where = f"after {len(text)} tokens"
    assert draft is not None, f"no draft {where}"
    assert draft.probs is not None
    assert draft.tokens.tolist() == tokens, f"{where}: {draft.tokens.tolist()}, not {tokens}"
    distance = np.abs(draft.probs - probabilities[: len(tokens)]).max()
    assert distance < 1e-4, f"{where}: probabilities are off by {distance}"


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[dict[str, NDArray[Any]]], object] = lambda tensors: None,
    *left_out: str,
    keys: Mapping[str, int] | None = None,
) -> Path:
    """A copy of a file of float32 with other tensors.

    :param change: is given the tensors by name, to change them.
    :param left_out: what the names of keys begin with that are left out.
    :param keys: others in their place.
    """
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    copy_keys(reader, writer, (*left_out, *(keys or {})))
    for key, value in (keys or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        else:
            writer.add_uint32(key, value)
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    change(tensors)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target
