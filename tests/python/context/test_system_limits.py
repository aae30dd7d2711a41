"""Limits of memory and CPU time, read from mock trees of /proc and /sys; and the default thread count."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import llamatap as lt
from llamatap import _system_limits, _threads

MIB = 2**20
GIB = 2**30

MOUNT_V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
MOUNTS_V1 = (
    "31 24 0:27 {root} /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory\n"
    "32 24 0:28 {root} /sys/fs/cgroup/cpu,cpuacct rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
)


class Machine:
    """A machine of 16 GiB, 10 of them available, with no swap and no cgroups yet."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", "MemTotal: 16777216 kB\nMemAvailable: 10485760 kB\nSwapFree: 0 kB\n")
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n")

    def write(self, path: str, text: str | int) -> None:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(str(text))

    def mount(self, own: str, mounts: str) -> None:
        self.write("proc/self/cgroup", own)
        self.write("proc/self/mountinfo", "22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw\n" + mounts)

    @property
    def available(self) -> int:
        return _system_limits.available_memory(self.root)

    @property
    def quota(self) -> float | None:
        return _system_limits.cpu_quota(self.root)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def about(size: float) -> object:
    """`size`, and up to 2 % more that is let through."""
    return pytest.approx(size * 1.01, rel=0.0101)


def test_without_cgroups_the_machine_is_the_limit(machine: Machine) -> None:
    assert machine.available == about(10 * GIB)
    assert machine.quota is None
    machine.write("proc/meminfo", "MemAvailable: 10485760 kB\nSwapFree: 2097152 kB\n")
    assert machine.available == about(12 * GIB)


def test_without_proc_all_memory_of_the_machine(tmp_path: Path) -> None:
    assert _system_limits.available_memory(tmp_path) == os.sysconf("SC_PHYS_PAGES") * os.sysconf(
        "SC_PAGE_SIZE"
    )
    assert _system_limits.cpu_quota(tmp_path) is None


def test_a_container_of_version_2(machine: Machine) -> None:
    # In a namespace of its own a container sees its cgroup as the root.
    machine.mount("0::/\n", MOUNT_V2)
    folder = "sys/fs/cgroup"
    machine.write(f"{folder}/memory.max", 4 * GIB)
    machine.write(f"{folder}/memory.high", "max")
    machine.write(f"{folder}/memory.current", 3 * GIB)
    machine.write(f"{folder}/memory.stat", f"anon {GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}\n")
    machine.write(f"{folder}/cpu.max", "150000 100000\n")
    # 1 GiB is free, 1.5 GiB are caches of files.
    assert machine.available == about(2.5 * GIB)
    assert machine.quota == 1.5
    machine.write(f"{folder}/memory.high", int(3.5 * GIB))
    assert machine.available == about(2 * GIB)
    machine.write(f"{folder}/memory.max", "max")
    machine.write(f"{folder}/memory.high", "max")
    machine.write(f"{folder}/cpu.max", "max 100000\n")
    assert machine.available == about(10 * GIB)
    assert machine.quota is None


@pytest.mark.parametrize("tight", ["user.slice", "user.slice/u1.slice", "user.slice/u1.slice/app.scope"])
def test_the_limit_of_any_parent_holds(machine: Machine, tight: str) -> None:
    own = "user.slice/u1.slice/app.scope"
    machine.mount(f"0::/{own}\n", MOUNT_V2)
    for folder in ("user.slice", "user.slice/u1.slice", own):
        machine.write(f"sys/fs/cgroup/{folder}/memory.max", 8 * GIB if folder != tight else GIB)
        machine.write(f"sys/fs/cgroup/{folder}/memory.current", 100 * MIB)
        machine.write(f"sys/fs/cgroup/{folder}/cpu.max", "max 100000" if folder != tight else "50000 100000")
    assert machine.available == about(GIB - 100 * MIB)
    assert machine.quota == 0.5


def test_swap_counts_as_far_as_the_cgroup_has_it(machine: Machine) -> None:
    machine.write("proc/meminfo", "MemAvailable: 10485760 kB\nSwapFree: 4194304 kB\n")
    machine.mount("0::/\n", MOUNT_V2)
    machine.write("sys/fs/cgroup/memory.max", GIB)
    machine.write("sys/fs/cgroup/memory.current", 0)
    machine.write("sys/fs/cgroup/memory.swap.max", 0)
    machine.write("sys/fs/cgroup/memory.swap.current", 0)
    assert machine.available == about(GIB)
    machine.write("sys/fs/cgroup/memory.swap.max", 2 * GIB)
    machine.write("sys/fs/cgroup/memory.swap.current", GIB)
    assert machine.available == about(2 * GIB)
    machine.write("sys/fs/cgroup/memory.swap.max", "max")
    assert machine.available == about(5 * GIB)


@pytest.mark.parametrize("root", ["/", "/docker/0123abc"])
def test_a_container_of_version_1(machine: Machine, root: str) -> None:
    # Without a namespace the path is the host's, and so is the root of what is mounted.
    machine.mount(
        "5:memory:/docker/0123abc\n4:cpu,cpuacct:/docker/0123abc\n1:name=systemd:/docker/0123abc\n",
        MOUNTS_V1.format(root=root),
    )
    below = "/docker/0123abc" if root == "/" else ""
    memory, cpu = f"sys/fs/cgroup/memory{below}", f"sys/fs/cgroup/cpu,cpuacct{below}"
    machine.write(f"{memory}/memory.limit_in_bytes", 2 * GIB)
    machine.write(f"{memory}/memory.usage_in_bytes", GIB)
    machine.write(f"{memory}/memory.stat", f"cache 5\ntotal_inactive_file {GIB // 4}\ntotal_active_file 0\n")
    machine.write(f"{cpu}/cpu.cfs_quota_us", 250000)
    machine.write(f"{cpu}/cpu.cfs_period_us", 100000)
    assert machine.available == about(1.25 * GIB)
    assert machine.quota == 2.5
    # Memory and swap together.
    machine.write(f"{memory}/memory.memsw.limit_in_bytes", 2 * GIB)
    machine.write(f"{memory}/memory.memsw.usage_in_bytes", int(1.5 * GIB))
    assert machine.available == about(0.75 * GIB)
    # No limit is the largest number of pages, and a quota of -1.
    for kind in ("memory", "memory.memsw"):
        machine.write(f"{memory}/{kind}.limit_in_bytes", 9223372036854771712)
    machine.write(f"{cpu}/cpu.cfs_quota_us", -1)
    assert machine.available == about(10 * GIB)
    assert machine.quota is None


def test_both_versions_at_once(machine: Machine) -> None:
    machine.mount(
        "4:memory:/box\n2:cpu,cpuacct:/box\n0::/box\n",
        MOUNTS_V1.format(root="/") + "33 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n",
    )
    (machine.root / "sys/fs/cgroup/unified/box").mkdir(parents=True)
    machine.write("sys/fs/cgroup/memory/box/memory.limit_in_bytes", 512 * MIB)
    machine.write("sys/fs/cgroup/memory/box/memory.usage_in_bytes", 12 * MIB)
    assert machine.available == about(500 * MIB)
    assert machine.quota is None


def test_paths_that_are_not_below_the_mount_are_its_root(machine: Machine) -> None:
    machine.mount("0::/../elsewhere\n", MOUNT_V2.replace(" / /sys", " /own /sys"))
    machine.write("sys/fs/cgroup/memory.max", GIB)
    machine.write("sys/fs/cgroup/memory.current", 0)
    assert machine.available == about(GIB)


@pytest.mark.parametrize("text", ["", "x", "x 34 56", "\x00\xff", "-5", "9" * 40, "max max"])
def test_files_of_nonsense_are_no_limits(machine: Machine, text: str) -> None:
    machine.mount(f"0::/\n{text}\n", MOUNT_V2 + text + "\n")
    for name in ("memory.max", "memory.high", "memory.current", "memory.stat", "cpu.max"):
        machine.write(f"sys/fs/cgroup/{name}", text)
    if text != "9" * 40:
        assert machine.available == about(10 * GIB)
    assert machine.quota is None


def test_a_full_cgroup_has_nothing_left(machine: Machine) -> None:
    machine.mount("0::/\n", MOUNT_V2)
    machine.write("sys/fs/cgroup/memory.max", GIB)
    machine.write("sys/fs/cgroup/memory.current", GIB + 4096)
    # 0 would mean that the limit is unknown.
    assert machine.available == 1


def test_the_limits_of_the_process_hold() -> None:
    code = """
import resource
from llamatap._system_limits import available_memory
size = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmSize")) * 1024
resource.setrlimit(resource.RLIMIT_AS, (size + 2**29, resource.RLIM_INFINITY))
assert 2**28 < available_memory() < 1.03 * 2**29, available_memory()
"""
    if not Path("/proc/self/status").exists():
        pytest.skip("no /proc")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_this_machine_has_memory() -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 2**20 < _system_limits.available_memory() < 64 * total


@pytest.mark.parametrize(
    ("n_cores", "quota", "expected"),
    [(8, None, 8), (8, 1.5, 2), (8, 2.0, 2), (8, 0.1, 1), (2, 6.0, 2), (1, None, 1)],
)
def test_threads_are_those_that_the_quota_pays_for(
    monkeypatch: pytest.MonkeyPatch, n_cores: int, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(_threads, "_physical_cores", lambda: n_cores)
    monkeypatch.setattr(_system_limits, "cpu_quota", lambda: quota)
    assert _threads.default_threads() == expected


def test_contexts_have_the_threads_of_the_quota(
    tiny_model: lt.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("llamatap._threads.usable_cpus", lambda: set(range(8)))
    monkeypatch.setattr(_system_limits, "cpu_quota", lambda: 1.5)
    monkeypatch.setattr(_threads, "_physical_cores", lambda: 8)
    with tiny_model.context(n_ctx=256) as context:
        assert context.n_threads == 2
    with pytest.warns(
        RuntimeWarning, match=r"n_threads=3 is more than the 2 CPUs' worth of time \(its CPU quota\)"
    ):
        tiny_model.context(n_ctx=256, n_threads=3).close()
    monkeypatch.setattr(_system_limits, "cpu_quota", lambda: 16.0)
    with pytest.warns(RuntimeWarning, match="n_threads=9 is more than the 8 CPUs of this process"):
        tiny_model.context(n_ctx=256, n_threads=9).close()


def _cgroup_for_tests(controller: str) -> Path:
    """A folder in which the tests may make cgroups: LLAMATAP_TEST_CGROUP_MEMORY or ..._CPU."""
    found = os.environ.get(f"LLAMATAP_TEST_CGROUP_{controller.upper()}")
    if found is None:
        pytest.skip(f"LLAMATAP_TEST_CGROUP_{controller.upper()} names no folder of cgroups")
    return Path(found)


def _output_in(folder: Path, code: str) -> str:
    """The output of a program run inside a cgroup."""
    enter = f"open({str(folder / 'cgroup.procs')!r}, 'w').write('0')\n"
    command = [sys.executable, "-c", enter + code]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout


def test_a_real_quota() -> None:
    folder = _cgroup_for_tests("cpu") / f"llamatap-test-{os.getpid()}"
    folder.mkdir()
    try:
        if (folder / "cpu.max").exists():
            (folder / "cpu.max").write_text("100000 100000")
        else:
            (folder / "cpu.cfs_quota_us").write_text("100000")
        code = (
            "from llamatap import _system_limits, _threads; "
            "print(_system_limits.cpu_quota(), _threads.default_threads())"
        )
        assert _output_in(folder, code).split() == ["1.0", "1"]
    finally:
        folder.rmdir()


def test_a_real_limit_of_memory(smollm2_path: Path) -> None:
    """The context that is refused would have had the process killed; the one that is offered works."""
    folder = _cgroup_for_tests("memory") / f"llamatap-test-{os.getpid()}"
    folder.mkdir()
    try:
        version_2 = (folder / "memory.max").exists()
        (folder / ("memory.max" if version_2 else "memory.limit_in_bytes")).write_text(str(GIB))
        code = f"""
import re
import llamatap as lt
with lt.Model({str(smollm2_path)!r}) as model:
    try:
        model.context(n_ctx=2**20)
    except MemoryError as error:
        most = int(re.search(r"fits is (\\d+)", str(error))[1])
    with model.context(n_ctx=most) as context:
        context.decode(lt.Batch.of(list(range(100, 600))))
        print(most, context.n_ctx)
"""
        most, n_ctx = map(int, _output_in(folder, code).split())
        assert 20_000 < most == n_ctx < 45_000
    finally:
        folder.rmdir()
