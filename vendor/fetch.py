"""Bring the engine's source (llama.cpp) into vendor/llama.cpp, as pinned in vendor/engine.json.

The source is taken from the sdist of the package that the pin names; pip downloads it and checks its
sha256. Then vendor/patches/*.patch are applied, in the order of their names. The folder carries a stamp
with the pin, the patches and the sha256 of every file, so that a second call costs nothing and a folder
that is half filled, edited, of another pin or of other patches is fetched anew.

    python vendor/fetch.py                     what the wheel needs
    python vendor/fetch.py --set peers         the tests, tools, vocabularies and templates too
    python vendor/fetch.py --sdist FILE        no network: FILE is the pinned sdist

Standard library only: CMake runs this inside isolated build environments.
"""

from __future__ import annotations

import argparse
import fcntl
import fnmatch
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PIN_FILE = HERE / "engine.json"
PATCHES = HERE / "patches"
STAMP = ".llamatap-stamp.json"
# Each set holds all that the sets before it hold.
SETS = ("build", "peers")


class FetchError(Exception):
    """The source could not be brought into the state that the pin describes."""


def read_pin() -> dict[str, Any]:
    pin: dict[str, Any] = json.loads(PIN_FILE.read_text())
    return pin


def identity(pin: dict[str, Any]) -> dict[str, Any]:
    """Decides, of the pin and the patches, whether a folder is still the right one."""
    return {
        "patches": {path.name: file_sha256(path) for path in sorted(PATCHES.glob("*.patch"))},
        "package": pin["package"],
        "version": pin["version"],
        "sha256": pin["sha256"],
        "sets": hashlib.sha256(json.dumps(pin["sets"], sort_keys=True).encode()).hexdigest(),
    }


def wanted(pin: dict[str, Any], name: str, path: str) -> bool:
    """Whether the set `name` (with those before it) holds the file `path`."""
    for set_name in SETS[: SETS.index(name) + 1]:
        rules = pin["sets"][set_name]

        def matches(pattern: str) -> bool:
            if pattern == "**":
                return True
            if pattern.endswith("/**"):
                return path.startswith(pattern[:-2])
            return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)

        if any(map(matches, rules["include"])) and not any(map(matches, rules["exclude"])):
            return True
    return False


def file_sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def fault(folder: Path, pin: dict[str, Any], name: str) -> str | None:
    """Why `folder` is not the pinned set `name`; None when it is."""
    if not folder.is_dir():
        return "it is not there"
    try:
        stamp = json.loads((folder / STAMP).read_text())
    except (OSError, ValueError):
        return "it has no readable stamp"
    if not isinstance(stamp, dict) or stamp.get("pin") != identity(pin):
        return "it is of another pin"
    held, files = stamp.get("set"), stamp.get("files")
    if held not in SETS or not isinstance(files, dict) or not files:
        return "its stamp is damaged"
    if SETS.index(held) < SETS.index(name):
        return f"it holds the set '{held}', not '{name}'"
    # CMake takes whatever source files it finds.
    present = {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()} - {STAMP}
    if extra := present - set(files):
        return f"{min(extra)} was added"
    for path, digest in files.items():
        file = folder / path
        if not file.is_file():
            return f"{path} is missing"
        if file_sha256(file) != digest:
            return f"{path} was changed"
    return None


def files_of(folder: Path) -> dict[str, str]:
    """The sha256 of each file of a folder, as its stamp has it."""
    try:
        files = json.loads((folder / STAMP).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return files if isinstance(files, dict) else {}


def download(pin: dict[str, Any], folder: Path) -> Path:
    """The pinned sdist, downloaded by pip (which checks the sha256) into `folder`."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{pin['package']}=={pin['version']} --hash=sha256:{pin['sha256']}\n")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    command += ["--no-binary", pin["package"], "-r", str(requirements), "-d", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise FetchError(
            f"pip could not download {pin['package']}=={pin['version']}:\n{done.stderr.strip()}\n"
            "Give the pinned sdist with --sdist FILE, or a source folder with "
            "-C cmake.define.LLAMATAP_ENGINE_DIR=FOLDER."
        )
    found = list(folder.glob("*.tar.gz"))
    if len(found) != 1:
        raise FetchError(f"pip left {len(found)} archives where one was expected")
    return found[0]


def apply_patch(patch: Path, folder: Path) -> set[str]:
    """Apply a unified diff below `folder`. Every line of it must be found where it says, as it says: a patch
    that fits by guessing may change another place of another engine.

    :returns: the paths that it changed.
    """

    def misfit(why: str) -> FetchError:
        return FetchError(f"{patch.name} does not fit this engine: {why}; make the patch anew for it")

    # Before the first file comes the reason.
    _, *parts = re.split(r"^--- a/", patch.read_text(encoding="utf-8"), flags=re.MULTILINE)
    changed: dict[str, str] = {}
    for part in parts:
        names, *hunks = re.split(r"^(?=@@ )", part, flags=re.MULTILINE)
        path = names.splitlines()[0].split("\t")[0]
        if not hunks or names.splitlines()[1:] != [f"+++ b/{path}"]:
            raise FetchError(f"{patch.name}: expected '+++ b/{path}' and hunks after '--- a/{path}'")
        if not (folder / path).is_file():
            raise misfit(f"{path} is not there")
        original = (folder / path).read_text(encoding="utf-8").splitlines(keepends=True)
        result: list[str] = []
        done = 0  # lines of the original
        for hunk in hunks:
            header, *lines = hunk.splitlines(keepends=True)
            sizes = re.match(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@", header)
            kinds = [line[0] for line in lines]
            if (
                sizes is None
                or set(kinds) - set(" -+")
                or kinds.count(" ") + kinds.count("-") != int(sizes[2] or 1)
                or kinds.count(" ") + kinds.count("+") != int(sizes[3] or 1)
                or not set(kinds) & set(" -")
            ):
                raise FetchError(
                    f"{patch.name}: {header.strip()} is followed by other lines than it announces, or by "
                    "none of the file's own"
                )
            begin = int(sizes[1]) - 1
            if begin < done:
                raise FetchError(f"{patch.name}: {header.strip()} lies before the end of the hunk before")
            result += original[done:begin]
            done = begin
            for line in lines:
                if line[0] in " -":
                    if original[done : done + 1] != [line[1:]]:
                        raise misfit(f"line {done + 1} of {path} should be {line[1:].strip()!r}")
                    done += 1
                if line[0] in " +":
                    result.append(line[1:])
        changed[path] = "".join(result + original[done:])
    if not changed:
        raise FetchError(f"{patch.name} changes nothing")
    for path, text in changed.items():
        (folder / path).write_text(text, encoding="utf-8")
    return set(changed)


def unpack(pin: dict[str, Any], name: str, sdist: Path, target: Path, previous: dict[str, str]) -> None:
    """Write the set `name` and its stamp below `target`, which must not exist.

    :param previous: the sha256 of each file of the folder that this one replaces.
    """
    found = file_sha256(sdist)
    if found != pin["sha256"]:
        raise FetchError(f"{sdist.name}: expected sha256 {pin['sha256']}, found {found}")
    target.mkdir(parents=True)
    files: dict[str, str] = {}
    marker = f"/{pin['subfolder']}/"
    with tarfile.open(sdist) as archive:
        for member in archive:
            _, mark, path = member.name.partition(marker)
            if not mark or not member.isfile() or not wanted(pin, name, path):
                continue
            if ".." in path.split("/") or path.startswith("/"):
                raise FetchError(f"{sdist.name} holds a path outside its folder: {path}")
            source = archive.extractfile(member)
            if source is None:
                raise FetchError(f"{path} cannot be read out of {sdist.name}")
            file = target / path
            file.parent.mkdir(parents=True, exist_ok=True)
            data = source.read()
            file.write_bytes(data)
            file.chmod(0o755 if member.mode & 0o100 else 0o644)
            # One time for all files of a pin: an unchanged engine is not compiled again.
            os.utime(file, (member.mtime, member.mtime))
            files[path] = hashlib.sha256(data).hexdigest()
    for patch in sorted(PATCHES.glob("*.patch")):
        for path in apply_patch(patch, target):
            files[path] = file_sha256(target / path)
    for path, digest in files.items():
        # Changed by a patch that came or went: whoever compiles must see it by its time.
        if previous.get(path, digest) != digest:
            os.utime(target / path)
    if not files:
        raise FetchError(f"{sdist.name} holds no {pin['subfolder']}")
    stamp = {"pin": identity(pin), "set": name, "files": files}
    (target / STAMP).write_text(json.dumps(stamp, indent=0, sort_keys=True))


def fetch(folder: Path, name: str, sdist: Path | None = None, *, quiet: bool = False) -> None:
    """Make `folder` hold the pinned set `name`; leave it alone when it does already."""
    pin = read_pin()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (folder.parent / f".{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in folder.parent.glob(f".{folder.name}.*"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
        reason = fault(folder, pin, name)
        if reason is None:
            return
        if folder.is_dir() and not (folder / STAMP).exists() and any(folder.iterdir()):
            raise FetchError(
                f"{folder} was not written by this program ({reason}); remove it, or build from "
                "it with -C cmake.define.LLAMATAP_ENGINE_DIR=FOLDER"
            )
        if not quiet:
            print(f"fetching the engine ({pin['upstream_commit']}, set '{name}'): {reason}")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
            source = sdist if sdist is not None else download(pin, Path(scratch))
            fresh = Path(scratch) / "new"
            unpack(pin, name, source, fresh, files_of(folder))
            if folder.exists():
                folder.rename(Path(scratch) / "old")
            fresh.rename(folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=SETS, default="build", dest="name")
    parser.add_argument("--folder", type=Path, default=HERE / "llama.cpp")
    parser.add_argument("--sdist", type=Path, help="the pinned sdist, instead of a download")
    parser.add_argument("--clean", action="store_true", help="remove the folder and stop")
    arguments = parser.parse_args()
    if arguments.clean:
        shutil.rmtree(arguments.folder, ignore_errors=True)
        return 0
    try:
        fetch(arguments.folder, arguments.name, arguments.sdist)
    except (FetchError, OSError, tarfile.TarError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
