"""The CPUs of this test process."""

from __future__ import annotations

import os

from llamatap._threads import usable_cpus


def _own_cpus() -> list[int]:
    """Give each process of pytest-xdist CPUs of its own: the engine's threads wait for one another busily."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is not None and hasattr(os, "sched_setaffinity"):
        number, count = int(worker.removeprefix("gw")), int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        if share := sorted(usable_cpus())[number::count]:
            os.sched_setaffinity(0, share)
    return sorted(usable_cpus())


#: Taken at the first import, before anything counts CPUs.
CPUS = _own_cpus()
