"""What is well and what is wrong, from facts alone, of one worker and of many."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from asyncrpc.tools.checkup.machine import resources, software, surroundings
from asyncrpc.tools.checkup.machine.facts import (
    ClockFacts,
    FileFacts,
    InterfaceFacts,
    LibraryFacts,
    LoopFacts,
    MemoryFacts,
    NetworkFacts,
    PageFacts,
    PrivateFileFacts,
    SecretFacts,
    SharedMemoryFacts,
    ThreadFacts,
    TimeoutFacts,
    TracingFacts,
    VersionFacts,
)
from asyncrpc.tools.checkup.machine.findings import (
    CheckFinding,
    CheckState,
    note,
    ok,
    wrong,
)
from asyncrpc.tools.checkup.machine.resources import size_of
from asyncrpc.tools.checkup.machine.software import meets
from asyncrpc.tools.checkup.machine.together import GroupFinding, check_walls, together

SHM_NAME = "/dev/shm"  # noqa: S108  (the kernel's)
OK, NOTE, WRONG = CheckState
MIB, GIB = 1 << 20, 1 << 30

VERSIONS = VersionFacts("0.1", "3.11.7", ">=3.11", ("CUDA 12.8",), ())
LOOP = LoopFacts("uvloop", is_running=True, has_uvloop=True, is_debug=False)
THREADS = ThreadFacts(8, None, 8, "", 16, 1)
MEMORY = MemoryFacts(32 * GIB, 16 * GIB, None, None, 0, None, None, GIB)
FILES = FileFacts(1 << 20, 1 << 20, 30, 4)
SHM = SharedMemoryFacts(16 * GIB, 15 * GIB, is_writable=True)
PAGES = PageFacts("madvise", "never", 0, 0, 2 * MIB)
CLOCKS = ClockFacts("tsc", ("tsc", "hpet"), is_synchronised=True, error_s=0.02)
ETH0 = InterfaceFacts("eth0", ("10.0.0.2", "fd00::2"), 1500)
IB0 = InterfaceFacts("ib0", ("10.1.0.2",), 2044)
NETWORK = NetworkFacts((ETH0,), ("10.0.0.2", "fd00::2", "127.0.0.1"))
SECRETS = SecretFacts(64, "ASYNCRPC_SECRET", has_tls=False, files=())
TRACING = TracingFacts(0, is_root=False)


def library(version: str, wanted: str, name: str = "torch") -> VersionFacts:
    return replace(VERSIONS, libraries=(LibraryFacts(name, version, wanted),))


def key(problem: str) -> SecretFacts:
    file = PrivateFileFacts("Tls.key", "/k.pem", problem)
    return replace(SECRETS, has_tls=True, files=(file,))


Check = Callable[[Any], Iterable[CheckFinding]]
CASES: list[tuple[Check, Any, str, CheckState, str, str]] = [
    # check, facts, name, state, words of what is found, words of the advice
    (software.check_versions, VERSIONS, "asyncrpc", OK, "0.1", ""),
    (software.check_versions, VERSIONS, "Python", OK, "3.11.7", ""),
    (
        *(software.check_versions, replace(VERSIONS, python="3.10.1")),
        *("Python", WRONG, "3.10.1", "asks for Python >=3.11"),
    ),
    (
        *(software.check_versions, library("2.13.0+cpu", ">=2.6")),
        *("torch", OK, "2.13.0+cpu, built with CUDA 12.8", ""),
    ),
    (
        *(software.check_versions, library("2.5.1", ">=2.6")),
        *("torch", WRONG, "2.5.1", "asks for >=2.6: pip install 'torch>=2.6'"),
    ),
    (
        *(software.check_versions, library("", ">=1.0", "msgpack")),
        *("msgpack", WRONG, "not installed", "pip install 'msgpack>=1.0'"),
    ),
    (
        *(software.check_versions, library("", ">=0.19", "uvloop")),
        *("uvloop", NOTE, "not installed", "calls are slower"),
    ),
    (
        software.check_versions,
        replace(VERSIONS, libraries=(LibraryFacts("lz4", "", ">=4", "compression"),)),
        *("extras", OK, "not installed: lz4 [compression]", ""),
    ),
    (software.check_loop, LOOP, "event loop", OK, "uvloop", ""),
    (
        *(software.check_loop, replace(LOOP, kind="asyncio")),
        *("event loop", NOTE, "asyncio, though uvloop", "asyncrpc.run(main())"),
    ),
    (
        *(software.check_loop, replace(LOOP, kind="asyncio", has_uvloop=False)),
        *("event loop", OK, "asyncio", ""),
    ),
    (
        *(software.check_loop, replace(LOOP, is_debug=True)),
        *("event loop", NOTE, "debug mode", "PYTHONASYNCIODEBUG"),
    ),
    (software.check_threads, THREADS, "threads", OK, "torch 8, plain", ""),
    (
        *(software.check_threads, replace(THREADS, workers_here=4, omp="8")),
        *("threads", NOTE, "torch 4 workers x 8", "OMP_NUM_THREADS=2 (it is 8)"),
    ),
    (
        *(software.check_threads, replace(THREADS, quota_cores=2.5)),
        *("threads", NOTE, "2.5 of 8 cores by the cgroup", "OMP_NUM_THREADS=2"),
    ),
    (
        software.check_threads,
        replace(THREADS, quota_cores=0.5, torch_threads=1),
        *("threads", OK, "0.5 of 8 cores", ""),
    ),
    (
        *(software.check_threads, replace(THREADS, workers_here=9, torch_threads=1)),
        *("threads", NOTE, "9 workers x 1", "start fewer"),
    ),
    (
        *(software.check_timeouts, TimeoutFacts(None, 60.0, 10.0, None)),
        *("time-outs", OK, "call no limit, start 60 s, lost peer 10 s, stall not", ""),
    ),
    (
        *(software.check_timeouts, TimeoutFacts(5.0, 60.0, 10.0, 30.0)),
        *("time-outs", OK, "call 5 s, start 60 s, lost peer 10 s, stall 30 s", ""),
    ),
    (resources.check_memory, MEMORY, "memory", OK, "16 GiB of 32 GiB", ""),
    (resources.check_memory, MemoryFacts(), "memory", OK, "unknown", ""),
    (
        *(resources.check_memory, replace(MEMORY, available=GIB)),
        *("memory", NOTE, "1 GiB of 32 GiB", "use less"),
    ),
    (resources.check_memory, MEMORY, "memory limit", OK, "none by a cgroup", ""),
    (
        *(resources.check_memory, replace(MEMORY, limit=8 * GIB, used=GIB)),
        *("memory limit", OK, "8 GiB by the cgroup, 1 GiB of it used", ""),
    ),
    (
        *(resources.check_memory, replace(MEMORY, limit=8 * GIB, used=15 * GIB // 2)),
        *("memory limit", NOTE, "7.5 GiB of it used", "raise it"),
    ),
    (
        *(resources.check_memory, replace(MEMORY, limit=GIB, used=1)),
        *("memory limit", NOTE, "1 GiB by", "LimitOptions.shared_memory_bytes"),
    ),
    (
        *(resources.check_memory, replace(MEMORY, kills=3)),
        *("memory kills", NOTE, "3 in this cgroup", "raise the limit"),
    ),
    (resources.check_memory, MEMORY, "address space", OK, "no limit", ""),
    (
        *(resources.check_memory, replace(MEMORY, address_space=4 * GIB)),
        *("address space", NOTE, "4 GiB", "ulimit -v unlimited"),
    ),
    (
        *(resources.check_memory, replace(MEMORY, locked=8 * MIB)),
        *("locked memory", OK, "8 MiB (RLIMIT_MEMLOCK)", ""),
    ),
    (resources.check_files, FILES, "open files", OK, "1048576 (RLIMIT_NO", ""),
    (
        *(resources.check_files, replace(FILES, files_max=None, opened=None)),
        *("open files", OK, "no limit", ""),
    ),
    (
        *(resources.check_files, replace(FILES, files_max=1024)),
        *("open files", NOTE, "1024 ", "4 workers may need 4096: `ulimit -n 4096`"),
    ),
    (
        *(resources.check_files, replace(FILES, files_max=4096, workers=1000)),
        *("open files", NOTE, "4096 ", "1000 workers may need 8256"),
    ),
    (
        *(resources.check_files, replace(FILES, files_max=1024, hard_max=1024)),
        *("open files", NOTE, "1024 ", "docker run --ulimit"),
    ),
    (
        *(resources.check_files, replace(FILES, files_max=64, opened=60)),
        *("open files", WRONG, "64 (RLIMIT_NOFILE), 60 open", "ulimit"),
    ),
    (resources.check_shared_memory, SHM, SHM_NAME, OK, "16 GiB, 15 GiB free", ""),
    (
        *(resources.check_shared_memory, SharedMemoryFacts(None)),
        *(SHM_NAME, NOTE, "does not exist", "--shm-size=1g"),
    ),
    (
        resources.check_shared_memory,
        SharedMemoryFacts(64 * MIB, 64 * MIB, is_writable=True),
        *(SHM_NAME, NOTE, "64 MiB", "it is small: .*--shm-size=1g"),
    ),
    (
        *(resources.check_shared_memory, replace(SHM, free=0)),
        *(SHM_NAME, NOTE, "nearly full", "ls -l /dev/shm"),
    ),
    (
        *(resources.check_shared_memory, replace(SHM, is_writable=False)),
        *(SHM_NAME, NOTE, "read-only", "may not write"),
    ),
    (resources.check_pages, PAGES, "huge pages", OK, "private madvise", ""),
    (resources.check_pages, PageFacts(), "huge pages", OK, "has none", ""),
    (
        *(resources.check_pages, replace(PAGES, reserved=8, free=3)),
        *("huge pages", OK, "3 of 8 free, 2 MiB each", ""),
    ),
    (
        *(resources.check_pages, replace(PAGES, private="never")),
        *("huge pages", NOTE, "private never", "echo madvise"),
    ),
    (surroundings.check_clocks, CLOCKS, "monotonic clock", OK, "tsc", ""),
    (surroundings.check_clocks, ClockFacts(), "monotonic clock", OK, "not told", ""),
    (
        *(surroundings.check_clocks, replace(CLOCKS, source="hpet")),
        *("monotonic clock", NOTE, "hpet: slow", "echo tsc > /sys"),
    ),
    (
        surroundings.check_clocks,
        replace(CLOCKS, source="acpi_pm", available=("acpi_pm",)),
        *("monotonic clock", NOTE, "acpi_pm: slow", "dmesg"),
    ),
    (surroundings.check_clocks, CLOCKS, "wall clock", OK, "within 20 ms", ""),
    (surroundings.check_clocks, ClockFacts(), "wall clock", OK, "not told", ""),
    (
        *(surroundings.check_clocks, replace(CLOCKS, is_synchronised=False)),
        *("wall clock", NOTE, "not synchronised", "chronyd"),
    ),
    (
        *(surroundings.check_clocks, replace(CLOCKS, error_s=3.0)),
        *("wall clock", NOTE, "within 3 s", "chronyc sources"),
    ),
    (
        *(surroundings.check_network, NETWORK),
        *("interface", OK, "eth0 10.0.0.2 (IPv4 and IPv6)", ""),
    ),
    (surroundings.check_network, NETWORK, "MTU", OK, "1500 bytes on eth0", ""),
    (
        surroundings.check_network,
        NetworkFacts((replace(ETH0, mtu=576),), ("10.0.0.2",)),
        *("MTU", NOTE, "576 bytes", "raise the MTU"),
    ),
    (
        surroundings.check_network,
        NetworkFacts((ETH0, IB0), ("10.0.0.2", "10.1.0.2")),
        *("interface", NOTE, "eth0 10.0.0.2 (IPv4), then ib0", "INTERFACE=ib0"),
    ),
    (
        surroundings.check_network,
        NetworkFacts((ETH0, IB0), ("10.0.0.2", "10.1.0.2"), is_one_host=True),
        *("interface", OK, "then ib0", ""),
    ),
    (
        surroundings.check_network,
        NetworkFacts((ETH0, IB0), ("10.1.0.2",), "ASYNCRPC_INTERFACE"),
        *("interface", OK, "ib0 10.1.0.2 (IPv4), by ASYNCRPC_INTERFACE", ""),
    ),
    (
        *(surroundings.check_network, NetworkFacts((), ("127.0.0.1", "::1"))),
        *("interface", NOTE, "no address but loopback", "network interface"),
    ),
    (
        surroundings.check_network,
        NetworkFacts((), ("127.0.0.1",), is_one_host=True),
        *("interface", OK, "no address but loopback", ""),
    ),
    (
        surroundings.check_network,
        NetworkFacts((), (), trouble="interface 'ib9' has no usable address"),
        *("interface", WRONG, "none is chosen", "'ib9' has no"),
    ),
    (
        *(surroundings.check_secrets, SECRETS),
        *("secret", OK, "64 bytes by ASYNCRPC_SECRET, no TLS", ""),
    ),
    (
        *(surroundings.check_secrets, replace(SECRETS, secret_bytes=None)),
        *("secret", OK, "none, no TLS", ""),
    ),
    (
        *(surroundings.check_secrets, replace(SECRETS, secret_bytes=8)),
        *("secret", NOTE, "8 bytes", "openssl rand"),
    ),
    (surroundings.check_secrets, key(""), "Tls.key", OK, "/k.pem: only its", ""),
    (
        *(surroundings.check_secrets, key("has mode 0644")),
        *("Tls.key", WRONG, "/k.pem", "has mode 0644"),
    ),
    (surroundings.check_tracing, TRACING, "debuggers", OK, "may attach", ""),
    (
        *(surroundings.check_tracing, TracingFacts(1, is_root=False)),
        *("debuggers", NOTE, "only root may attach (ptrace_scope 1)", "as root"),
    ),
    (
        *(surroundings.check_tracing, TracingFacts(1, is_root=True)),
        *("debuggers", OK, "may attach", ""),
    ),
    (
        *(surroundings.check_tracing, TracingFacts(3, is_root=True)),
        *("debuggers", NOTE, "no process may attach (ptrace_scope 3)", "without them"),
    ),
]


@pytest.mark.parametrize(("check", "facts", "name", "state", "text", "advice"), CASES)
def test_check_reports_state_finding_and_advice(  # noqa: PLR0917  (a row of the table)
    check: Check, facts: Any, name: str, state: CheckState, text: str, advice: str
) -> None:
    (result,) = (finding for finding in check(facts) if finding.check == name)
    assert result.state is state
    assert text in result.found
    assert all(part in result.advice for part in advice.split(".*"))
    assert bool(result.advice) == (
        state is not OK
    )  # who is told of trouble, what to do


@pytest.mark.parametrize(
    ("version", "wanted", "is_met"),
    [
        ("2.6", ">=2.6", True),
        ("2.6.0", ">=2.6", True),
        ("2.13.0+cpu", ">=2.6", True),
        ("2.5.9", ">=2.6", False),
        ("3.0", ">=2.60, <3", False),
        ("2.99", ">=2.60,<3", True),
        ("1.4.2", "~=1.4.0", True),
        ("1.5.0", "~=1.4.0", False),
        ("1.4", "==1.4.0", True),
        ("1.4.1", "!=1.4.1", False),
        ("1.4.1", "<=1.4", False),
        ("1.4.1", ">1.4", True),
        ("1.0", "", True),
        ("1.0", "at least 2", True),  # what is not understood is met
        ("unknown", ">=1", False),
    ],
)
def test_versions_are_compared_by_their_numbers(
    version: str, wanted: str, *, is_met: bool
) -> None:
    assert meets(version, wanted) == is_met


@pytest.mark.parametrize(
    ("count", "words"),
    [
        *((0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB")),
        *(
            (64 * MIB, "64 MiB"),
            (int(23.5 * GIB), "23.5 GiB"),
            (2000 * GIB, "2000 GiB"),
        ),
    ],
)
def test_sizes_are_written_for_people(count: int, words: str) -> None:
    assert size_of(count) == words


OK, NOTE, WRONG = CheckState


def shown(rows: list[GroupFinding]) -> list[tuple[str, CheckState, str, str]]:
    return [(row.check, row.state, row.found, " ".join(row.workers)) for row in rows]


def test_equal_findings_are_one_row() -> None:
    findings = {name: [ok("Python", "3.11"), ok("uvloop", "1")] for name in "abc"}
    assert shown(together(findings)) == [
        ("Python", OK, "3.11", "a b c"),
        ("uvloop", OK, "1", "a b c"),
    ]


def test_failing_findings_name_their_workers() -> None:
    bad = wrong("secret file", "mode 0644", "chmod 600")
    small = note("memory", "1 GiB", "use less")
    findings: dict[str, list[CheckFinding]] = {
        "a": [ok("memory", "9 GiB")],
        "b": [small, bad],
        "c": [ok("memory", "8 GiB")],
    }
    rows = together(findings)
    assert shown(rows) == [
        ("memory", OK, "9 GiB (the first; all: --json)", "a c"),
        ("memory", NOTE, "1 GiB", "b"),
        ("secret file", WRONG, "mode 0644", "b"),
    ]
    assert rows[-1].advice == "chmod 600"


def test_differing_versions_are_a_note() -> None:
    rows = together({"a": [ok("torch", "2.6")], "b": [ok("torch", "2.7")]})
    assert shown(rows) == [("torch", NOTE, "2.6", "a"), ("torch", NOTE, "2.7", "b")]
    assert "the workers differ" in rows[0].advice


def test_empty_findings_give_empty_tables() -> None:
    assert together({}) == []
    assert check_walls({}) == []


def test_clocks_of_other_hosts_are_compared_within_their_error() -> None:
    rows = check_walls(
        {
            "here": (0.0, 0.0),
            "near": (0.05, 0.001),
            "unsure": (0.3, 0.25),
            "late": (-3.0, 0.001),
        }
    )
    near, unsure, late = rows
    assert (near.state, near.workers) == (OK, ("near",))
    assert near.found == "0.05 s ahead of this host's, to within 0.001 s"
    assert (unsure.state, unsure.workers) == (OK, ("unsure",))
    assert (late.state, late.workers) == (NOTE, ("late",))
    assert late.found == "3 s behind this host's, to within 0.001 s"
    assert [bool(row.advice) for row in rows] == [False, False, True]
