"""The native core: its import, its back ends, its log lines, and the only access to its objects.

A public class of Python owns an object of the core. The rest of the package gets at it through
:func:`native_of`, never through an attribute.
"""

from __future__ import annotations

import atexit
import logging
import os
import platform
from abc import abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

from llamatap._validate import NotCopied

# Without this the engine installs a terminate handler that starts a debugger; it looks once, when loaded.
_had_variable = "GGML_NO_BACKTRACE" in os.environ
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
from llamatap import _core  # noqa: E402

if not _had_variable:
    del os.environ["GGML_NO_BACKTRACE"]

__all__ = ["NativeOwner", "_core", "build_config", "ensure_backends", "flush_log", "native_of"]

logging.getLogger("llamatap").addHandler(logging.NullHandler())
# For messages of the engine, apart from those of the package.
_logger = logging.getLogger("llamatap.engine")
_loaded = False
# Before the interpreter shuts down, while computing threads can still be stopped in order.
atexit.register(_core.shut_down)

_N = TypeVar("_N")


class NativeOwner(NotCopied, Generic[_N]):
    """Base of objects that own an object of the core."""

    @abstractmethod
    def _get_native(self) -> _N:
        """The core's object, for :func:`native_of`.

        :raises ClosedError: the owner was closed.
        """


def native_of(owner: NativeOwner[_N]) -> _N:
    """The core's object that `owner` owns.

    :raises ClosedError: the owner was closed.
    """
    return owner._get_native()  # noqa: SLF001  same module


def ensure_backends() -> None:
    """Load the engine's back ends; the first call does, later ones do nothing."""
    global _loaded
    if not _loaded:
        _core.load_backends(str(Path(_core.__file__).parent / "lib"))
        _loaded = True
        flush_log()


def flush_log() -> None:
    """Hand the engine's waiting log lines to the logger ``llamatap.engine``."""
    for level, text in _core.drain_log():
        if text:
            _logger.log(level, "%s", text)


def build_config() -> dict[str, Any]:
    """Report how this build was made and what it runs on.

    :returns: ``version``, ``engine_commit`` (llama.cpp), ``compiler``, ``build_type``, ``portable``
        (CPU kernels chosen at run time), ``openmp``, ``sanitize``, ``platform``, ``cpu_features`` (the
        instruction sets of the CPU back end in use) and ``devices`` (name, description, kind,
        memory_total in bytes).
    """
    ensure_backends()
    config: dict[str, Any] = dict(_core.build_info())
    config["portable"] = config["portable"] == "ON"
    config["openmp"] = config["openmp"] == "ON"
    config["platform"] = f"{platform.system()} {platform.machine()}"
    config["cpu_features"] = [name for name, value in _core.cpu_features() if value == "1"]
    config["devices"] = _core.devices()
    return config
