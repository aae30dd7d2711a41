"""Brings up the native core: imports it, loads the engine's back ends, passes its log lines on."""

from __future__ import annotations

import atexit
import logging
import math
import os
import platform
from pathlib import Path
from typing import Any

# Without this the engine installs a terminate handler that starts a debugger; it looks once, when loaded.
_had_variable = "GGML_NO_BACKTRACE" in os.environ
os.environ.setdefault("GGML_NO_BACKTRACE", "1")
from llamatap import _core, _system_limits  # noqa: E402

if not _had_variable:
    del os.environ["GGML_NO_BACKTRACE"]

__all__ = [
    "_core",
    "build_config",
    "default_threads",
    "ensure_backends",
    "flush_log",
    "usable_cpus",
    "within_quota",
]

logging.getLogger("llamatap").addHandler(logging.NullHandler())
# Messages of the engine, apart from those of the package.
_logger = logging.getLogger("llamatap.engine")
_loaded = False
# Before the interpreter goes down, while threads that compute can still be stopped in good order.
atexit.register(_core.shut_down)


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


def usable_cpus() -> set[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def within_quota(n_cpus: int) -> int:
    """The number of CPUs, or as many as the CPU quota of this process pays for (1.5 CPUs: 2), whichever is
    less."""
    quota = _system_limits.cpu_quota()
    return n_cpus if quota is None else max(1, min(n_cpus, math.ceil(quota)))


def default_threads() -> int:
    """The number of physical cores that this process may run on, within its CPU quota."""
    return within_quota(_physical_cores())


def _physical_cores() -> int:
    cores = set()
    for cpu in usable_cpus():
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        try:
            cores.add(siblings.read_text())
        except OSError:
            return len(usable_cpus())
    return len(cores)


def build_config() -> dict[str, Any]:
    """How this build was made and what it runs on.

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
