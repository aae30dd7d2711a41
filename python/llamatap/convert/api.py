"""Conversion of drafters: checkpoints of trainers to GGUF files, and back."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llamatap._validate import choice, shown
from llamatap._validate import path as checked_path
from llamatap.convert import eagle3
from llamatap.convert.checkpoint_files import read_checkpoint, write_checkpoint
from llamatap.convert.eagle3_config import EAGLE3_FORMATS, Eagle3Format, format_of
from llamatap.convert.gguf_files import TYPES, GgufSource, WeightType, write_gguf
from llamatap.errors import InvalidInputError, UnsupportedError

__all__ = ["Conversion", "to_checkpoint", "to_gguf"]


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    :ivar path: the written file or folder.
    :ivar kind: "eagle3".
    :ivar target_layers: the i of the H_i that the drafter takes.
    :ivar inherited: matrices that the file does not have, as they are the target's.
    """

    path: Path
    kind: str
    target_layers: tuple[int, ...]
    inherited: tuple[str, ...] = ()


def _output(output: str | os.PathLike[str], *sources: Path) -> Path:
    path = checked_path("output", output)
    if any(path.exists() and path.samefile(one) for one in sources if one.exists()):
        raise InvalidInputError(f"{path} is the file to convert; choose another name")
    return path


def to_gguf(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    type: WeightType = "f16",
    target_layers: Sequence[int] | None = None,
    embedding: Literal["auto", "own"] = "auto",
    ignore: Collection[str] = (),
) -> Conversion:
    """Convert a drafter's checkpoint to a GGUF file, which :func:`llamatap.load_drafter` and the engine's own
    programs draft with.

    :param checkpoint: a folder with config.json and weights: EAGLE-3 of speculators, of SpecForge and EAGLE
        (``LlamaForCausalLMEagle3``), of AngelSlim (``Eagle3LlamaForCausalLM``). Weights are safetensors, or
        ``pytorch_model.bin``, which needs PyTorch.
    :param target: the GGUF file that it drafts for. The tokenizer is taken from it, and widths are compared.
    :param output: the file to write. It appears whole, or not at all.
    :param type: type of the matrices: "f32", "f16", "bf16", "q8_0" (rows that are no multiple of 32 are
        float16). Norms are float32.
    :param target_layers: the i of the H_i that it was trained on, where the checkpoint does not say so, or
        wrongly.
    :param embedding: "auto" leaves out a token embedding, or a head, that equals the target's: the draft then
        uses the target's. "own" keeps it.
    :param ignore: names of tensors and settings to leave out, which would be refused otherwise.
    :raises UnsupportedError: the engine's graph does not compute with tensors or settings of the checkpoint,
        which are named.
    :raises InvalidInputError: the checkpoint lacks a tensor, contradicts itself, or is for another target.
    :raises ModelNotFoundError: a file is missing.
    :raises ModelLoadError: a file cannot be read.
    :raises MissingPackageError: ``gguf``, or PyTorch, is missing.
    :raises OSError: the file cannot be written.
    """
    source = checked_path("checkpoint", checkpoint)
    choice("type", type, TYPES)
    choice("embedding", embedding, ("auto", "own"))
    if isinstance(ignore, (str, bytes)):
        raise InvalidInputError(f"ignore must be a list of names, not {shown(ignore)}")
    found = read_checkpoint(source)
    model = GgufSource(checked_path("target", target))
    path = _output(output, model.path)
    if format_of(found.config) is None:
        raise UnsupportedError(
            f"{source} is no checkpoint of a known drafter: expected EAGLE-3 of speculators, SpecForge or "
            f"AngelSlim; found architectures {shown(found.config.get('architectures'))}, "
            f"speculators_model_type {shown(found.config.get('speculators_model_type'))}"
        )
    content, shape = eagle3.to_content(
        found, model, target_layers=target_layers, embedding=embedding, ignored=ignore
    )
    write_gguf(path, content, kind=type, tokenizer=model)
    inherited = tuple(one for one in ("token_embd.weight", "output.weight") if one not in content.tensors)
    return Conversion(path, "eagle3", shape.target_layers, inherited)


def to_checkpoint(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    format: Eagle3Format = "speculators",
) -> Conversion:
    """Convert an EAGLE-3 draft back to a checkpoint, from which a trainer can start.

    :param draft: a GGUF file of architecture ``eagle3``.
    :param target: the GGUF file that it drafts for; the token embedding and the head are taken from it where
        the draft has none.
    :param folder: the folder to write, with model.safetensors and config.json. Float matrices keep their
        type, quantised ones become float32.
    :param format: "speculators", "eagle3" (SpecForge, EAGLE), or "angelslim".
    :raises UnsupportedError: the draft is of another kind, or the format cannot say what the draft computes.
    :raises InvalidInputError: the draft is for another target.
    :raises ModelNotFoundError: a file is missing.
    :raises ModelLoadError: a file cannot be read.
    :raises MissingPackageError: ``gguf`` is missing.
    :raises OSError: the folder cannot be written.
    """
    choice("format", format, EAGLE3_FORMATS)
    source = GgufSource(checked_path("draft", draft))
    model = GgufSource(checked_path("target", target))
    path = checked_path("folder", folder)
    if source.arch != "eagle3":
        raise UnsupportedError(
            f"{source.path.name} is of architecture {source.arch}; only eagle3 can be turned back"
        )
    config, tensors, shape = eagle3.from_gguf(source, model, format)
    write_checkpoint(path, config, tensors)
    return Conversion(path, "eagle3", shape.target_layers)
