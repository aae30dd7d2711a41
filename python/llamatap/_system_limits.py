"""Limits of memory and CPU time of this process: the machine's, its cgroups' and its own.

Python's standard library knows only CPU affinity, and no portable interface reports a container's share, so
the kernel's files are read here. cgroups of versions 2 and 1 may both be mounted; a parent's limit also
holds.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from llamatap.errors import OutOfMemoryError

__all__ = ["available_memory", "cpu_quota", "gibibytes", "require_memory"]

_ROOT = Path("/")

#: The kernel's estimate is conservative, and not all reserved memory is touched: allow 2 % more.
_TOLERANCE = 1.02

#: Smaller requests are not checked: reading the figures takes 0.1 ms.
_SMALLEST_CHECKED = 32 << 20


def available_memory(root: Path | None = None) -> int:
    """Estimate how many bytes this process can take before the system refuses or kills it.

    The least of: the machine's available memory with its free swap; the room in each cgroup up to the root,
    with file caches that can be dropped; the room under RLIMIT_AS and RLIMIT_DATA. Without /proc (macOS), all
    of the machine's memory: such systems swap without limit.

    :param root: where /proc and /sys are, for tests.
    """
    root = root or _ROOT
    meminfo = _kibibytes(root / "proc/meminfo")
    if "MemAvailable" not in meminfo:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    swap = meminfo.get("SwapFree", 0)
    rooms = [meminfo["MemAvailable"] + swap]
    for version, folder in _cgroups(root, "memory"):
        if version == 2:
            rooms += _room_v2(folder, swap)
        else:
            rooms += _room_v1(folder, swap)
    rooms += _room_under_rlimits(root)
    return max(1, int(min(rooms) * _TOLERANCE))


def cpu_quota(root: Path | None = None) -> float | None:
    """CPU time that the cgroups allow, in CPUs (``docker run --cpus=1.5``: 1.5); None without a limit.

    :param root: where /proc and /sys are, for tests.
    """
    shares = []
    for version, folder in _cgroups(root or _ROOT, "cpu"):
        if version == 2:
            quota, period = [*_text(folder / "cpu.max").split(), "", ""][:2]
        else:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:
            shares.append(int(quota) / int(period))
    return min(shares, default=None)


def require_memory(needed: int, what: str, advice: str) -> None:
    """Refuse an allocation that does not fit into memory: malloc would succeed, and the kernel would kill the
    process later.

    :param needed: bytes.
    :param what: the subject of the error, with its verb: "the states of 3 prompts take".
    :param advice: what to do instead.
    :raises OutOfMemoryError: more than :func:`available_memory`.
    """
    if needed < _SMALLEST_CHECKED:
        return
    available = available_memory()
    if needed > available:
        raise OutOfMemoryError(
            f"{what} {gibibytes(needed)} of memory, and {gibibytes(available)} are available; {advice}"
        )


def gibibytes(size: float) -> str:
    """Bytes as a message shows them."""
    if size < 2**30:
        return f"{math.ceil(size / 2**20)} MiB"
    return f"{size / 2**30:.2f} GiB"


def _room_v2(folder: Path, swap: int) -> list[int]:
    # Above memory.high a process is slowed to a crawl rather than killed.
    limits = [_bytes(folder / name) for name in ("memory.max", "memory.high")]
    limit = min((found for found in limits if found is not None), default=None)
    used = _bytes(folder / "memory.current")
    if limit is None or used is None:
        return []
    swap_limit, swap_used = _bytes(folder / "memory.swap.max"), _bytes(folder / "memory.swap.current")
    if swap_limit is not None and swap_used is not None:
        swap = min(swap, max(0, swap_limit - swap_used))
    stat = _numbers(folder / "memory.stat")
    return [limit - used + stat.get("inactive_file", 0) + stat.get("active_file", 0) + swap]


def _room_v1(folder: Path, swap: int) -> list[int]:
    stat = _numbers(folder / "memory.stat")
    caches = stat.get("total_inactive_file", 0) + stat.get("total_active_file", 0)
    rooms = []
    # The second limit counts memory and swap together.
    for kind, more in (("memory", caches + swap), ("memory.memsw", caches)):
        limit, used = _bytes(folder / f"{kind}.limit_in_bytes"), _bytes(folder / f"{kind}.usage_in_bytes")
        if limit is not None and used is not None:
            rooms.append(limit - used + more)
    return rooms


def _room_under_rlimits(root: Path) -> list[int]:
    if sys.platform == "win32":
        return []
    import resource

    status = _kibibytes(root / "proc/self/status")
    rooms = []
    for limit, used in ((resource.RLIMIT_AS, "VmSize"), (resource.RLIMIT_DATA, "VmData")):
        soft = resource.getrlimit(limit)[0]
        if soft != resource.RLIM_INFINITY and used in status:
            rooms.append(soft - status[used])
    return rooms


def _cgroups(root: Path, controller: str) -> Iterator[tuple[int, Path]]:
    """The cgroups of this process that limit what `controller` counts, from its own up to the mounted root:
    (version, folder)."""
    own = {}
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, path = [*line.split(":", 2), "", ""][:3]
        if number == "0" and not controllers:
            own[2] = path
        elif controller in controllers.split(","):
            own[1] = path
    for line in _text(root / "proc/self/mountinfo").splitlines():
        # ID PARENT DEVICE ROOT MOUNTPOINT OPTIONS [MORE...] - TYPE SOURCE SUPEROPTIONS
        mount, _, filesystem = (part.split() for part in line.partition(" - "))
        if len(mount) < 5 or len(filesystem) < 3:
            continue
        if filesystem[0] == "cgroup2":
            version = 2
        elif filesystem[0] == "cgroup" and controller in filesystem[2].split(","):
            version = 1
        else:
            continue
        if version not in own:
            continue
        # In a container the mount may begin at its own cgroup, or the path be one of the host's.
        begin, top = _unescaped(mount[3]), root / _unescaped(mount[4]).lstrip("/")
        below = os.path.relpath(own[version], begin)
        folder = top if below.startswith("..") else top / below
        while True:
            yield version, folder
            if folder == top or top not in folder.parents:
                break
            folder = folder.parent


def _unescaped(path: str) -> str:
    return path.encode("latin-1", "replace").decode("unicode_escape")


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def _bytes(path: Path) -> int | None:
    """A limit or a count; None without a file or a limit."""
    text = _text(path)
    # Version 1 writes the largest number of pages for no limit.
    return int(text) if text.isdigit() and int(text) < 2**62 else None


def _numbers(path: Path) -> dict[str, int]:
    fields = (line.split() for line in _text(path).splitlines())
    return {found[0]: int(found[1]) for found in fields if len(found) == 2 and found[1].isdigit()}


def _kibibytes(path: Path) -> dict[str, int]:
    """The values of lines such as "Name:  123 kB", in bytes."""
    found = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if len(words) == 2 and words[1] == "kB" and words[0].isdigit():
            found[name] = int(words[0]) * 1024
    return found
