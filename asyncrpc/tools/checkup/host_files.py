"""Reads the kernel's files about this process and its host.

Each function takes the root of the file system, so that a test can read its own tree.
A missing or invalid value is None or empty: kernels and containers differ.

Source: proc(5), cgroups(7), Documentation/admin-guide/cgroup-v1 and cgroup-v2.rst of
Linux.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from asyncrpc.tools.checkup.machine.facts import ClockFacts, PageFacts

ROOT: Final = Path("/")
_TEXT_MAX: Final = 1 << 20  # of one file of the kernel's
_NO_LIMIT_V1: Final = 1 << 62  # the largest number of pages, in bytes
_KIB: Final = 1 << 10


def text_of(path: Path) -> str:
    """Return the content of a file, stripped; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.read(_TEXT_MAX).decode(errors="replace").strip()
    except OSError:
        return ""


def number_in(path: Path) -> int | None:
    """Return the number in a file; None if the file has no number."""
    text = text_of(path)
    return int(text) if re.fullmatch(r"-?[0-9]+", text, re.ASCII) else None


def meminfo(root: Path = ROOT) -> dict[str, int]:
    """Return the numbers of /proc/meminfo: bytes, or counts."""
    numbers = {}
    for line in text_of(root / "proc/meminfo").splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words and words[0].isdecimal():
            numbers[name] = int(words[0]) * (_KIB if words[1:] == ["kB"] else 1)
    return numbers


def read_pages(root: Path = ROOT) -> PageFacts:
    """Return the facts about huge pages."""
    folder = root / "sys/kernel/mm/transparent_hugepage"
    memory = meminfo(root)
    return PageFacts(
        private=_bracketed(text_of(folder / "enabled")),
        shared=_bracketed(text_of(folder / "shmem_enabled")),
        reserved=memory.get("HugePages_Total", 0),
        free=memory.get("HugePages_Free", 0),
        page_bytes=memory.get("Hugepagesize", 0),
    )


def _bracketed(text: str) -> str:
    """Return the chosen word of a text such as `always [madvise] never`."""
    match = re.search(r"\[([^\]]+)\]", text)
    return match[1] if match else ""


def read_clock_source(root: Path = ROOT) -> ClockFacts:
    """Return the source of the monotonic clock."""
    folder = root / "sys/devices/system/clocksource/clocksource0"
    return ClockFacts(
        source=text_of(folder / "current_clocksource"),
        available=tuple(text_of(folder / "available_clocksource").split()),
    )


def read_ptrace_scope(root: Path = ROOT) -> int | None:
    """Return Yama's scope; None: this kernel has no Yama."""
    return number_in(root / "proc/sys/kernel/yama/ptrace_scope")


def read_mtu(interface: str, root: Path = ROOT) -> int | None:
    """Return the packet size of an interface, in bytes."""
    return number_in(root / "sys/class/net" / interface / "mtu")


# --- cgroups -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CgroupFacts:
    """The limits that the cgroups of this process set.

    Attributes:
        memory_limit: bytes; None: no limit.
        memory_used: by all processes in the cgroup of the limit; None: unknown.
        memory_kills: kills in this process's cgroup for lack of memory; None: unknown.
        quota_cores: processor time in cores; None: no limit.
    """

    memory_limit: int | None = None
    memory_used: int | None = None
    memory_kills: int | None = None
    quota_cores: float | None = None


@dataclass(frozen=True, slots=True)
class _Mount:
    kind: str
    top: str  # which part of the hierarchy is mounted
    point: Path
    options: frozenset[str]


def read_cgroups(root: Path = ROOT) -> CgroupFacts:
    """Return the limits of the cgroups of this process, of either version.

    The least limit of a cgroup and its ancestors counts.
    """
    memory = list(_folders("memory", root))
    limits = [(limit, folder) for folder in memory if (limit := _memory_limit(folder))]
    least, limiting = min(limits, default=(None, None))
    quotas = [_quota(folder) for folder in _folders("cpu", root)]
    return CgroupFacts(
        memory_limit=least,
        memory_used=None if limiting is None else _memory_used(limiting),
        memory_kills=_kills(memory[0]) if memory else None,
        quota_cores=min((quota for quota in quotas if quota is not None), default=None),
    )


def _folders(controller: str, root: Path) -> Iterator[Path]:
    """Yield the directory of the cgroup with a controller, then its ancestors."""
    mounts = list(_mounts(root))
    first = [mount for mount in mounts if controller in mount.options]
    for mount in first or [
        candidate for candidate in mounts if candidate.kind == "cgroup2"
    ]:
        path = _path_in(mount, controller, root)
        if path is None:
            continue
        yield from _upwards(path, mount.point)
        return


def _upwards(path: Path, top: Path) -> Iterator[Path]:
    while path != top and top in path.parents:
        yield path
        path = path.parent
    yield top


def _mounts(root: Path) -> Iterator[_Mount]:
    for line in text_of(root / "proc/self/mountinfo").splitlines():
        before, _, after = line.partition(" - ")
        ours, theirs = before.split(), after.split()
        if len(ours) < 5 or len(theirs) < 3 or theirs[0] not in ("cgroup", "cgroup2"):  # noqa: PLR2004
            continue
        options = frozenset(theirs[2].split(",")) if theirs[0] == "cgroup" else ()
        point = root / ours[4].lstrip("/")
        yield _Mount(theirs[0], ours[3], point, frozenset(options))


def _path_in(mount: _Mount, controller: str, root: Path) -> Path | None:
    """Return where this process is in a mounted hierarchy."""
    for line in text_of(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        is_ours = (
            number == "0" and not names
            if mount.kind == "cgroup2"
            else controller in names.split(",")
        )
        if not is_ours:
            continue
        inner = path.removeprefix(mount.top.rstrip("/")).lstrip("/")
        folder = mount.point / inner
        # A container may see its host's path, but have mounted only the end of it.
        return folder if ".." not in inner and folder.is_dir() else mount.point
    return None


def _memory_limit(folder: Path) -> int | None:
    for name in ("memory.max", "memory.limit_in_bytes"):
        limit = number_in(folder / name)
        if limit is not None and 0 < limit < _NO_LIMIT_V1:
            return limit
    return None


def _memory_used(folder: Path) -> int | None:
    for name in ("memory.current", "memory.usage_in_bytes"):
        used = number_in(folder / name)
        if used is not None:
            stat = _numbers(text_of(folder / "memory.stat").splitlines())
            # Cached files, whose memory the kernel reclaims.
            back = stat.get("total_inactive_file", stat.get("inactive_file", 0))
            return max(0, used - back)
    return None


def _kills(folder: Path) -> int | None:
    for name in ("memory.events", "memory.oom_control"):
        kills = _numbers(text_of(folder / name).splitlines()).get("oom_kill")
        if kills is not None:
            return kills
    return None


def _numbers(lines: Iterable[str]) -> dict[str, int]:
    numbers = {}
    for line in lines:
        name, _, value = line.partition(" ")
        with contextlib.suppress(ValueError):
            numbers[name] = int(value)
    return numbers


def _quota(folder: Path) -> float | None:
    words = text_of(folder / "cpu.max").split()
    if not words:
        words = [
            text_of(folder / f"cpu.cfs_{field}_us") for field in ("quota", "period")
        ]
    with contextlib.suppress(ValueError):
        quota, period = map(int, words)
        if quota > 0 and period > 0:
            return quota / period
    return None
