"""The number of threads that the engine computes with: CPU affinity, physical cores and CPU quota."""

from __future__ import annotations

import math
import os
import warnings
from pathlib import Path

from llamatap import _system_limits
from llamatap._validate import integer

__all__ = ["default_threads", "thread_count", "usable_cpus", "within_quota"]


def usable_cpus() -> set[int]:
    """The CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def within_quota(n_cpus: int) -> int:
    """The number of CPUs, limited to the CPU quota of this process, rounded up (1.5 CPUs: 2)."""
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


def thread_count(n_threads: int | None) -> int:
    """`n_threads`, with a warning when it is too many; None: :func:`default_threads`.

    :raises InvalidInputError: it is not a number of threads.
    """
    threads = default_threads() if n_threads is None else integer("n_threads", n_threads, 1)
    n_cpus = len(usable_cpus())
    usable = within_quota(n_cpus)
    if 512 >= threads > usable:
        limit = f"{n_cpus} CPUs" if usable == n_cpus else f"{usable} CPUs' worth of time (its CPU quota)"
        warnings.warn(
            f"n_threads={threads} is more than the {limit} of this process: the threads wait for each other "
            "some hundred times a decode, and generation takes up to 3 times as long",
            RuntimeWarning,
            stacklevel=4,
        )
    return threads
