"""The installed package, and how it coexists with other packages."""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.paths import ROOT

import llamatap as lt
from llamatap._extras import missing
from llamatap._native import _core

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LIBRARIES = Path(_core.__file__).parent / "lib"


def test_build_config_tells_how_it_was_built() -> None:
    config = lt.build_config()
    assert config["version"] == importlib.metadata.version("llamatap") == lt.__version__
    assert re.fullmatch(r"[0-9a-f]{9}|local", config["engine_commit"])
    assert config["compiler"]
    assert any(device["kind"] == "cpu" for device in config["devices"])
    # A build for this machine uses what it has.
    flags = Path("/proc/cpuinfo").read_text()
    for feature, flag in (("AVX2", " avx2 "), ("FMA", " fma "), ("AVX512", " avx512bw ")):
        assert (feature in config["cpu_features"]) == (flag in flags), feature


def test_libraries_have_names_of_our_own_and_are_there_once() -> None:
    names = sorted(path.name for path in LIBRARIES.iterdir())
    assert all(name.startswith("libllamatap-") and name.endswith(".so") for name in names), names
    assert {"libllamatap-llama.so", "libllamatap-ggml.so", "libllamatap-ggml-base.so"} <= set(names)
    assert not any(path.is_symlink() for path in LIBRARIES.iterdir())
    for path in LIBRARIES.iterdir():
        dynamic = subprocess.run(["readelf", "-d", path], capture_output=True, text=True, check=True).stdout
        for name in re.findall(r"\[(lib(?:ggml|llama(?!tap))[^\]]*)\]", dynamic):
            pytest.fail(f"{path.name} has or needs {name}")


def test_the_core_exports_its_entry_point_alone() -> None:
    table = subprocess.run(
        ["nm", "-D", "--defined-only", _core.__file__], capture_output=True, text=True, check=True
    ).stdout
    assert re.findall(r" [A-Z] (\S+)", table) == ["PyInit__core"]


def test_notices_ship() -> None:
    files = importlib.metadata.files("llamatap")
    assert files is not None
    names = {Path(str(file)).name for file in files if "licenses" in str(file)}
    assert {"LICENSE", "llama.cpp.txt", "pybind11.txt", "llamafile-sgemm.txt", "yarn.txt"} <= names
    assert not any(str(file).endswith((".h", ".hpp", ".cmake", ".a")) for file in files)


def test_the_notice_of_the_engine_is_the_engines() -> None:
    vendored = ROOT / "vendor" / "llama.cpp" / "LICENSE"
    if not vendored.exists():
        pytest.skip("the engine's source is not here")
    assert (ROOT / "licenses" / "llama.cpp.txt").read_text() == vendored.read_text()


@pytest.mark.slow
def test_import_brings_in_little() -> None:
    code = "import sys, llamatap; print(*sorted(m.split('.')[0] for m in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = {"jinja2", "matplotlib", "safetensors", "pip", "argparse"}
    assert not heavy & set(done.stdout.split())


#: Code that needs a package of an extra: the code, the package, the extra.
EXTRAS = [
    ("from llamatap.__main__ import main; main(['demo'])", "matplotlib", "demo"),
    ("from llamatap.__main__ import main; main(['serve', '--model', 'x=y.gguf'])", "uvicorn", "server"),
    ("from llamatap.__main__ import main; main(['serve', '--model', 'x=y.gguf'])", "fastapi", "server"),
    (
        "from llamatap.__main__ import main; main(['serve', '--model', 'x=y.gguf'])",
        "prometheus_client",
        "server",
    ),
    ("from llamatap.ray.worker import import_ray; import_ray()", "ray", "ray"),
    ("import llamatap.train.pytorch", "torch", "train"),
    ("import llamatap.connectors.speculators", "torch", "train"),
    ("from llamatap.dataset.row_files import import_pyarrow; import_pyarrow()", "pyarrow", "dataset"),
    ("from llamatap.dataset.layouts import layout_class; layout_class('speculators')", "pyarrow", "dataset"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "package", "extra"), EXTRAS)
def test_what_is_missing_names_its_extra(code: str, package: str, extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages = {re.split(r"[\[>=]", one)[0] for one in project["optional-dependencies"][extra]}
    assert package.replace("_", "-") in packages
    hidden = f"""
import importlib.abc, importlib.util, sys

class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == {package!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Hidden())
find_spec = importlib.util.find_spec
importlib.util.find_spec = lambda name: None if name == {package!r} else find_spec(name)
{code}
"""
    done = subprocess.run([sys.executable, "-c", hidden], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert re.search(rf'(^|\W){package}(\W.*|): pip install "llamatap\[{extra}\]"$', last), done.stderr


def test_training_brings_what_draws_its_plots() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Without it a training has no progress.png, and says nothing.
    assert any(one.startswith("matplotlib") for one in project["optional-dependencies"]["train"])


def test_missing_packages_are_caught_as_python_names_them() -> None:
    assert issubclass(lt.MissingPackageError, ImportError)
    assert issubclass(lt.MissingPackageError, lt.UnsupportedError)
    with pytest.raises(
        lt.MissingPackageError, match=r'^torch and ray are missing: .*"llamatap\[train,ray\]"$'
    ):
        raise missing("torch", "ray")


def test_import_leaves_the_environment_alone() -> None:
    code = "import os; a = dict(os.environ); import llamatap; assert a == dict(os.environ)"
    subprocess.run([sys.executable, "-c", code], check=True)
