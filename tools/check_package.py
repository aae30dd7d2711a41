"""Build the sdist, from it the wheel without any network, and try the wheel in an empty environment.

python tools/check_package.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BIGGEST_WHEEL = 15 * 2**20
SMOKE = """
import llamatap as lt
from llamatap.presets import load_preset
config = lt.build_config()
assert config["devices"], config
assert load_preset("z-image").n_layer == 36
try:
    lt.Model("missing.gguf")
except lt.ModelNotFoundError:
    print(lt.__version__, config["engine_commit"], config["cpu_features"])
"""


def run(*command: str | Path, cwd: Path | None = None, offline: bool = False) -> None:
    """Run a command; offline in a network namespace of its own, where this user may make one."""
    prefix: list[str] = []
    if offline:
        namespace = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
        if (
            shutil.which("unshare")
            and subprocess.run([*namespace, "true"], capture_output=True).returncode == 0
        ):
            prefix = namespace
        else:
            print("note: no network namespace here; offline by pip's own --no-index alone")
    subprocess.run([*prefix, *map(str, command)], check=True, cwd=cwd)


def check_sdist(sdist: Path) -> None:
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for needed in ("vendor/llama.cpp/include/llama.h", "vendor/llama.cpp/.llamatap-stamp.json", "LICENSE"):
        assert needed in names, f"{needed} is not in {sdist.name}"
    stray = [name for name in names if name.startswith(("build/", ".git", "tests/", "bench/"))]
    assert not stray, stray
    print(f"{sdist.name}: {len(names)} files, {sdist.stat().st_size / 2**20:.1f} MiB")


def check_wheel(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    roots = {name.partition("/")[0] for name in names}
    assert len(roots) == 2, roots
    libraries = [name for name in names if name.endswith(".so")]
    assert len(libraries) == len({Path(name).name for name in libraries})
    assert all(name.startswith(("llamatap/lib/libllamatap-", "llamatap/_core.")) for name in libraries), (
        libraries
    )
    stray = [name for name in names if name.endswith((".h", ".hpp", ".a", ".cmake", ".pc", ".cpp"))]
    assert not stray, stray
    for needed in (
        "llamatap/py.typed",
        "llamatap/_core.pyi",
        "llamatap/presets/z-image.toml",
        "llamatap/serve/page.html",
    ):
        assert needed in names, needed
    assert sum("licenses/" in name for name in names) >= 5, "the notices are not in the wheel"
    size = wheel.stat().st_size
    assert size < BIGGEST_WHEEL, size
    print(f"{wheel.name}: {len(names)} files, {size / 2**20:.1f} MiB")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="llamatap-package-") as scratch:
        folder = Path(scratch)
        run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", folder, ROOT)
        (sdist,) = folder.glob("*.tar.gz")
        check_sdist(sdist)
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--no-index",
            "--no-deps",
            "--no-build-isolation",
        ]
        run(*pip, "--wheel-dir", folder, sdist, offline=True)
        (wheel,) = folder.glob("*.whl")
        check_wheel(wheel)
        venv.create(folder / "venv", with_pip=True)
        python = folder / "venv" / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
        run(python, "-c", SMOKE, cwd=folder)
        run(folder / "venv" / "bin" / "llamatap", "--help", cwd=folder)


if __name__ == "__main__":
    main()
