"""Conversion of drafters: checkpoints of trainers to GGUF files, and back."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from llamatap._validate import choice, flag, shown
from llamatap._validate import path as checked_path
from llamatap.convert import eagle3
from llamatap.convert.checkpoint_files import read_checkpoint, write_checkpoint
from llamatap.convert.dflash import dflash_content, is_dflash
from llamatap.convert.eagle3_config import EAGLE3_FORMATS, Eagle3Format, format_of
from llamatap.convert.gguf_files import TYPES, GgufSource, WeightType, write_gguf
from llamatap.convert.mtp import joined, mtp_from_gguf, whole_model
from llamatap.convert.mtp_block import is_mtp_file, read_mtp, write_mtp
from llamatap.errors import InvalidInputError, UnsupportedError
from llamatap.layers import LayerId, normalize

__all__ = ["FORMATS", "Conversion", "Format", "to_checkpoint", "to_gguf"]

#: Formats of checkpoints that can be written.
Format: TypeAlias = Eagle3Format | Literal["mtp"]
FORMATS: tuple[Format, ...] = (*EAGLE3_FORMATS, "mtp")


@dataclass(frozen=True)
class Conversion:
    """Result of a conversion.

    :ivar path: the written file or folder.
    :ivar kind: "eagle3", "dflash" or "mtp".
    :ivar target_layers: the i of the H_i that the drafter takes.
    :ivar inherited: matrices that a draft file does not have, as they are the target's.
    """

    path: Path
    kind: str
    target_layers: tuple[int, ...]
    inherited: tuple[str, ...] = ()


def _output(name: str, output: str | os.PathLike[str], *sources: Path) -> Path:
    path = checked_path(name, output)
    if any(path.exists() and path.samefile(one) for one in sources if one.exists()):
        raise InvalidInputError(f"{path} is a file to convert; choose another name")
    return path


def _checked_layers(ids: Iterable[LayerId] | None, n_layer: int) -> list[int] | None:
    """The i of the H_i that a caller names.

    :raises InvalidInputError: one is out of range, or norm(H_n).
    """
    if ids is None:
        return None
    found = normalize(ids, n_layer)
    if "norm" in found:
        raise InvalidInputError(f'target_layers: drafters take an H_i, 0..{n_layer}, not "norm"')
    return [int(one) for one in found]


def to_gguf(
    checkpoint: str | os.PathLike[str],
    target: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    type: WeightType = "f16",
    target_layers: Iterable[LayerId] | None = None,
    embedding: Literal["auto", "own"] = "auto",
    ignore: Collection[str] = (),
    whole: bool = False,
) -> Conversion:
    """Convert a drafter's checkpoint to a GGUF file, which :func:`llamatap.load_drafter` and the engine's own
    programs draft with.

    :param checkpoint: a folder with config.json and weights: EAGLE-3 of speculators, of SpecForge and EAGLE
        (``LlamaForCausalLMEagle3``), of AngelSlim (``Eagle3LlamaForCausalLM``); DFlash and DSpark of
        speculators and SpecForge. Weights are safetensors, or ``pytorch_model.bin``, which needs PyTorch. Or
        an ``mtp.safetensors`` (:mod:`llamatap.convert.mtp_block`).
    :param target: the GGUF file that it drafts for. The tokenizer is taken from it, and widths are compared.
    :param output: the file to write. It appears whole, or not at all.
    :param type: type of the drafter's matrices: "f32", "f16", "bf16", "q8_0" (rows that are no multiple of 32
        are float16). Norms are float32.
    :param target_layers: the i of the H_i that it was trained on, where the checkpoint does not say so, or
        wrongly. Not for MTP blocks.
    :param embedding: "auto" leaves out a token embedding, or a head, that equals the target's: the draft then
        uses the target's. "own" keeps it. Not for MTP blocks.
    :param ignore: names of tensors and settings to leave out, which would be refused otherwise. Not for MTP
        blocks.
    :param whole: write the target too, rewritten as ``mimo2``, with the MTP block behind it, for programs
        that take the block from the model's file. The target's matrices keep their types.
    :raises UnsupportedError: the engine's graph does not compute with tensors or settings of the checkpoint,
        which are named; or ``whole`` with a target that ``mimo2`` cannot express.
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
    target_path = checked_path("target", target)
    path = _output("output", output, target_path, source)
    if is_mtp_file(source):
        if target_layers is not None or ignore or embedding != "auto":
            raise InvalidInputError("target_layers, embedding and ignore are not for MTP blocks")
        return _mtp_to_gguf(source, target_path, path, type, flag("whole", whole))
    if flag("whole", whole):
        raise InvalidInputError(f"whole is for an MTP block (.safetensors), not for {source}")
    found = read_checkpoint(source)
    model = GgufSource(target_path)
    is_block = is_dflash(found.config)
    if not is_block and format_of(found.config) is None:
        raise UnsupportedError(
            f"{source} is no checkpoint of a known drafter: expected EAGLE-3 of speculators, SpecForge or "
            f"AngelSlim, DFlash or DSpark; found architectures {shown(found.config.get('architectures'))}, "
            f"speculators_model_type {shown(found.config.get('speculators_model_type'))}"
        )
    make = dflash_content if is_block else eagle3.to_content
    chosen = _checked_layers(target_layers, model.n_layer)
    content, shape = make(found, model, target_layers=chosen, embedding=embedding, ignored=ignore)
    write_gguf(path, content, kind=type, tokenizer=model)
    inherited = tuple(one for one in ("token_embd.weight", "output.weight") if one not in content.tensors)
    return Conversion(path, content.arch, shape.target_layers, inherited)


def _mtp_to_gguf(source: Path, target: Path, output: Path, kind: WeightType, whole: bool) -> Conversion:
    block, model = read_mtp(source), GgufSource(target)
    if whole:
        # The alignment is that of the tensors in the file, which are written anew.
        left_out = ("general.architecture", "general.alignment")
        copied: dict[str, tuple[str, ...]] = {"general.": left_out, "tokenizer.": ()}
        write_gguf(output, whole_model(block, model), kind=kind, tokenizer=model, copied=copied)
    else:
        write_gguf(output, joined(block, model), kind=kind, tokenizer=model)
    return Conversion(output, "mtp", (model.n_layer,))


def to_checkpoint(
    draft: str | os.PathLike[str],
    target: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: Format = "speculators",
    verifier: str | None = None,
) -> Conversion:
    """Convert a draft back to a checkpoint, from which a trainer can start.

    :param draft: a GGUF file of architecture ``eagle3``; or of ``mimo2`` with one MTP block, whole or alone.
    :param target: the GGUF file that it drafts for; the token embedding and the head of an EAGLE-3 checkpoint
        are taken from it where the draft has none.
    :param output: the folder to write, with model.safetensors and config.json; with "mtp", the file. Float
        matrices keep their type, quantised ones become float32.
    :param format: "speculators", "eagle3" (SpecForge, EAGLE), "angelslim"; or "mtp" for an mtp.safetensors.
    :param verifier: name or folder of the target as transformers has it, for config.json of "speculators":
        its model class loads it. None leaves it open.
    :raises UnsupportedError: the draft is of another kind, or the format cannot say what the draft computes.
    :raises InvalidInputError: the draft is for another target.
    :raises ModelNotFoundError: a file is missing.
    :raises ModelLoadError: a file cannot be read.
    :raises MissingPackageError: ``gguf`` is missing.
    :raises OSError: the folder cannot be written.
    """
    choice("format", format, FORMATS)
    source = GgufSource(checked_path("draft", draft))
    model = GgufSource(checked_path("target", target))
    path = _output("output", output, source.path, model.path)
    if verifier is not None and format != "speculators":
        raise InvalidInputError(f"verifier is for the format speculators, not for {format}")
    expected = "mimo2" if format == "mtp" else "eagle3"
    if source.arch != expected:
        raise UnsupportedError(
            f"{source.path.name} is of architecture {source.arch}; the format {format} is for {expected}"
        )
    if format == "mtp":
        config, tensors = mtp_from_gguf(source, model)
        return Conversion(write_mtp(path, tensors, config), "mtp", (model.n_layer,))
    entries, weights, shape = eagle3.from_gguf(source, model, format, verifier)
    write_checkpoint(path, entries, weights)
    return Conversion(path, "eagle3", shape.target_layers)
