"""The facts of a process and its host are read right, whatever kernel it has."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import platform
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import asyncrpc
from asyncrpc import NetworkOptions, Options
from asyncrpc.core.transport.tls import Tls
from asyncrpc.tools.checkup.host_files import (
    CgroupFacts,
    meminfo,
    number_in,
    read_cgroups,
    read_clock_source,
    read_mtu,
    read_pages,
    read_ptrace_scope,
    text_of,
)
from asyncrpc.tools.checkup.machine.checks import check_all
from asyncrpc.tools.checkup.machine.facts import (
    ClockFacts,
    LibraryFacts,
    PageFacts,
    SharedMemoryFacts,
)
from asyncrpc.tools.checkup.machine.findings import CheckState
from asyncrpc.tools.checkup.reading import (
    Circumstances,
    gather,
    libraries,
    secret_file,
    shared_memory,
    wall_clock,
)

GIB = 1 << 30
Tree = dict[str, str]


def write_tree(root: Path, tree: Tree) -> Path:
    """Write files below a directory; return it."""
    for name, text in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


V2_MOUNT = "29 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1_MOUNTS = (
    "31 30 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
    "32 30 0:28 / /sys/fs/cgroup/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
    "33 30 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
)
OTHER_MOUNT = "25 1 8:1 / / rw,relatime - ext4 /dev/root rw\nnot a line of it\n"
V2: Tree = {
    "proc/self/mountinfo": OTHER_MOUNT + V2_MOUNT,
    "proc/self/cgroup": "0::/system.slice/job.scope\n",
    "sys/fs/cgroup/memory.stat": "inactive_file 0\n",
    "sys/fs/cgroup/system.slice/memory.max": "max\n",
    "sys/fs/cgroup/system.slice/job.scope/memory.max": f"{4 * GIB}\n",
    "sys/fs/cgroup/system.slice/job.scope/memory.current": f"{3 * GIB}\n",
    "sys/fs/cgroup/system.slice/job.scope/memory.stat": (
        f"anon {GIB}\ninactive_file {GIB}\n"
    ),
    "sys/fs/cgroup/system.slice/job.scope/memory.events": "oom 3\noom_kill 2\n",
    "sys/fs/cgroup/system.slice/job.scope/cpu.max": "150000 100000\n",
}
V2_FACTS = CgroupFacts(4 * GIB, 2 * GIB, 2, 1.5)
V1: Tree = {
    "proc/self/mountinfo": OTHER_MOUNT + V1_MOUNTS,
    "proc/self/cgroup": "3:memory:/job\n2:cpu,cpuacct:/job\n0::/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/job/memory.limit_in_bytes": f"{4 * GIB}\n",
    "sys/fs/cgroup/memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
    "sys/fs/cgroup/memory/job/memory.stat": (
        f"inactive_file 1\ntotal_inactive_file {GIB}\n"
    ),
    "sys/fs/cgroup/memory/job/memory.oom_control": (
        "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
    ),
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/job/cpu.cfs_period_us": "100000\n",
}


@pytest.mark.parametrize("tree", [V1, V2], ids=["version 1", "version 2"])
def test_cgroup_limits_of_both_versions_are_read(tmp_path: Path, tree: Tree) -> None:
    assert read_cgroups(write_tree(tmp_path, tree)) == V2_FACTS


def test_lower_limit_of_an_outer_cgroup_counts(tmp_path: Path) -> None:
    around = {
        "sys/fs/cgroup/system.slice/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/system.slice/memory.current": "7\n",
        "sys/fs/cgroup/system.slice/cpu.max": "100000 200000\n",
    }
    facts = read_cgroups(write_tree(tmp_path, {**V2, **around}))
    assert facts == CgroupFacts(GIB, 7, 2, 0.5)


def test_container_sees_the_end_of_its_host_path(tmp_path: Path) -> None:
    """Of version 1, without a namespace of cgroups: the mount begins at the path."""
    tree = {
        "proc/self/mountinfo": (
            "31 30 0:27 /docker/7 /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
        ),
        "proc/self/cgroup": "3:memory:/docker/7\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{GIB}\n",
    }
    assert read_cgroups(write_tree(tmp_path, tree)) == CgroupFacts(GIB)


@pytest.mark.parametrize("path", ["/../other", "/gone/by/now", "/"])
def test_path_outside_the_mount_stands_for_the_mount(tmp_path: Path, path: str) -> None:
    tree = {
        "proc/self/mountinfo": V2_MOUNT,
        "proc/self/cgroup": f"0::{path}\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/other/memory.max": "1\n",
    }
    assert read_cgroups(write_tree(tmp_path, tree)).memory_limit == GIB


@pytest.mark.parametrize(
    "changed",
    [
        {"proc/self/cgroup": ""},
        {"proc/self/cgroup": "nonsense\n\n:::\n"},
        {"proc/self/mountinfo": ""},
        {"proc/self/mountinfo": "- cgroup2\n1 2 3 4 - cgroup2 x\n"},
    ],
)
def test_missing_cgroup_means_no_limit(tmp_path: Path, changed: Tree) -> None:
    assert read_cgroups(write_tree(tmp_path, {**V2, **changed})) == CgroupFacts()


def test_odd_cgroup_content_means_no_limit(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/system.slice/job.scope"
    odd = {
        f"{folder}/memory.max": "-1\n",
        f"{folder}/memory.events": "oom_kill\nx y\n",
        f"{folder}/cpu.max": "max 100000\n",
    }
    assert read_cgroups(write_tree(tmp_path, {**V2, **odd})) == CgroupFacts()
    odd = {f"{folder}/cpu.max": "1000 0\n", f"{folder}/memory.max": "0\n"}
    assert read_cgroups(write_tree(tmp_path, {**V2, **odd})).quota_cores is None


def test_facts_are_empty_without_proc(tmp_path: Path) -> None:
    assert read_cgroups(tmp_path) == CgroupFacts()
    assert read_pages(tmp_path) == PageFacts()
    assert read_clock_source(tmp_path) == ClockFacts()
    assert read_ptrace_scope(tmp_path) is None
    assert read_mtu("eth0", tmp_path) is None
    assert meminfo(tmp_path) == {}


def test_kernel_files_are_read(tmp_path: Path) -> None:
    huge = "sys/kernel/mm/transparent_hugepage"
    clocks = "sys/devices/system/clocksource/clocksource0"
    write_tree(
        tmp_path,
        {
            f"{huge}/enabled": "always [madvise] never\n",
            f"{huge}/shmem_enabled": "always within_size advise [never] deny force\n",
            "proc/meminfo": (
                "MemTotal:  24 kB\nHugePages_Total:   8\nHugePages_Free:    3\n"
                "Hugepagesize:   2048 kB\nOdd: x\nNone:\n"
            ),
            f"{clocks}/current_clocksource": "hpet\n",
            f"{clocks}/available_clocksource": "tsc hpet acpi_pm \n",
            "proc/sys/kernel/yama/ptrace_scope": "1\n",
            "sys/class/net/eth0/mtu": "1400\n",
        },
    )
    assert read_pages(tmp_path) == PageFacts("madvise", "never", 8, 3, 2 << 20)
    assert meminfo(tmp_path)["MemTotal"] == 24 << 10
    assert read_clock_source(tmp_path) == ClockFacts("hpet", ("tsc", "hpet", "acpi_pm"))
    assert read_ptrace_scope(tmp_path) == 1
    assert read_mtu("eth0", tmp_path) == 1400


def test_odd_files_read_as_missing_values(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"\xff\xfe12")
    assert number_in(tmp_path / "odd") is None
    assert text_of(tmp_path) == ""  # a directory
    (tmp_path / "odd").write_text("٣")  # a digit, but not one of the kernel's
    assert number_in(tmp_path / "odd") is None


PLAIN = Circumstances(Options(secret="x" * 32), is_one_host=True)


def test_facts_describe_this_process() -> None:
    facts = gather(PLAIN, {"OMP_NUM_THREADS": "3"})
    assert facts.versions.asyncrpc == asyncrpc.__version__
    assert facts.versions.python == platform.python_version()
    installed = {library.name: library.version for library in facts.versions.libraries}
    assert installed["torch"] == importlib.metadata.version("torch")
    assert facts.threads.torch_threads == torch.get_num_threads()
    assert facts.threads.omp == "3"
    assert (facts.secrets.secret_bytes, facts.secrets.origin) == (32, "Options.secret")
    assert facts.files.files_max is None or facts.files.files_max > 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
def test_facts_describe_this_host() -> None:
    facts = gather(PLAIN, {})
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert facts.memory.total is not None
    assert abs(facts.memory.total - pages) < pages / 10
    assert facts.files.opened
    assert facts.clocks.source or not Path("/sys/devices/system/clocksource").exists()
    for interface in facts.network.interfaces:
        assert interface.mtu is not None
        assert interface.addresses


def test_every_check_reports_on_the_real_host() -> None:
    findings = check_all(gather(PLAIN, {}))
    names = [finding.check for finding in findings]
    for name in (
        *("asyncrpc", "Python", "torch", "event loop", "threads", "time-outs"),
        *("memory", "memory limit", "open files", "huge pages"),
        *("monotonic clock", "wall clock", "interface", "secret", "debuggers"),
    ):
        assert name in names
    assert all(finding.found for finding in findings)
    wrong = [finding for finding in findings if finding.state is CheckState.WRONG]
    assert wrong == []  # or the tests could not run here


async def test_event_loop_of_a_worker_is_named() -> None:
    loop = type(asyncio.get_running_loop())
    circumstances = replace(PLAIN, loop=loop, is_debug=True)
    facts = await asyncio.to_thread(gather, circumstances, {})
    assert facts.loop.kind == loop.__module__.partition(".")[0]
    assert facts.loop.is_debug


def test_wall_clock_can_be_judged() -> None:
    is_synchronised, error_s = wall_clock()
    if is_synchronised:
        assert error_s is not None
        assert 0 <= error_s < 3600
    else:
        assert error_s is None


def test_requirements_are_read() -> None:
    requirements = libraries(
        [
            "torch>=2.6",
            "uvloop>=0.19; sys_platform != 'win32'",
            'ray<3,>=2.60; extra == "ray"',
            'pytest>=8; extra == "dev"',
            "no-such-package-here (>=1)",
        ]
    )
    assert [
        (requirement.name, requirement.wanted, requirement.extra)
        for requirement in requirements
    ] == [
        ("torch", ">=2.6", ""),
        ("uvloop", ">=0.19", ""),
        ("ray", "<3,>=2.60", "ray"),
        ("no-such-package-here", ">=1", ""),
    ]
    assert requirements[-1] == LibraryFacts("no-such-package-here", "", ">=1")
    assert {library.name for library in libraries([])} >= {"torch", "msgpack", "uvloop"}


def test_missing_interface_is_reported() -> None:
    options = Options(network=NetworkOptions(interface="none7"))
    facts = gather(Circumstances(options), {"ASYNCRPC_INTERFACE": "none7"})
    assert "none7" in facts.network.trouble
    assert facts.network.chosen_by == "ASYNCRPC_INTERFACE"


@pytest.mark.parametrize(
    ("mode", "words"), [(0o600, ""), (0o644, "has mode 0644"), (0o660, "has mode 0660")]
)
def test_files_readable_by_others_are_reported(
    tmp_path: Path, mode: int, words: str
) -> None:
    path = tmp_path / "key.pem"
    path.write_text("a key")
    path.chmod(mode)
    file = secret_file("Tls.key", str(path))
    assert file.problem.startswith(words)
    assert bool(file.problem) == bool(words)
    tls = Tls(certificate="c.pem", key=path, ca="ca.pem")
    environ = {"ASYNCRPC_SECRET_FILE": str(path)}
    files = gather(Circumstances(Options(tls=tls)), environ).secrets.files
    assert [checked.what for checked in files] == ["ASYNCRPC_SECRET_FILE", "Tls.key"]
    assert all(checked.problem == file.problem for checked in files)


def test_missing_file_is_reported(tmp_path: Path) -> None:
    assert "cannot be read" in secret_file("x", str(tmp_path / "none")).problem


def test_file_system_is_measured(tmp_path: Path) -> None:
    facts = shared_memory(tmp_path)
    assert facts.size is not None
    assert facts.size >= facts.free
    assert facts.is_writable
    assert shared_memory(tmp_path / "none") == SharedMemoryFacts(None)
