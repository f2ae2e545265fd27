"""What a test has left behind: descriptors, threads, child processes and tasks.

Take a `ResourceSnapshot` before and `compare` it after.  Resources that are about to
go, such as a thread that has been told to end, get a grace period; the comparison
returns as soon as they are gone.

Source: proc(5) for descriptors and children.  Without /proc, descriptors and child
processes are not watched.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self, TypeVar

T = TypeVar("T")

GRACE_S: Final = 2.0  # a busy machine may take this long to end a thread
_POLL_FIRST_S: Final = 0.001
_POLL_MAX_S: Final = 0.05
_FD_TABLE: Final = Path("/proc/self/fd")
# Helpers of the interpreter that live until it exits, by their command lines.
_RESIDENT: Final = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")


@dataclass(frozen=True, slots=True)
class Leaks:
    """The resources that are new, in words.  False if empty."""

    descriptors: tuple[str, ...] = ()
    threads: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return any((self.descriptors, self.threads, self.processes, self.tasks))

    def __str__(self) -> str:
        kinds = ("descriptors", "threads", "processes", "tasks")
        by_kind = {kind: getattr(self, kind) for kind in kinds}
        lines = (f"{kind}: {', '.join(are)}" for kind, are in by_kind.items() if are)
        return "left behind: " + "; ".join(lines)


@dataclass(frozen=True, slots=True)
class ResourceSnapshot:
    """The resources of this process at one moment."""

    descriptors: Mapping[int, str]
    threads: frozenset[threading.Thread]
    processes: Mapping[int, str]
    tasks: frozenset[asyncio.Task[object]]

    @classmethod
    def take(cls) -> Self:
        """Take a snapshot; with tasks only if a loop is running."""
        return cls(
            descriptors=open_descriptors(),
            threads=frozenset(threading.enumerate()),
            processes=child_processes(),
            tasks=frozenset(running_tasks()),
        )

    def compare(self, *, grace_s: float = GRACE_S) -> Leaks:
        """Return the resources that have been added since and stay.

        Blocks the thread for at most `grace_s` seconds, and only if something is left.
        On a running loop use `compare_async`: threads may need the loop to end.
        """
        deadline_s = time.monotonic() + grace_s
        pause_s = _POLL_FIRST_S
        while (leaks := self._new()) and time.monotonic() < deadline_s:
            time.sleep(pause_s)  # there is no event for a closed descriptor
            pause_s = min(2 * pause_s, _POLL_MAX_S)
        return leaks

    async def compare_async(self, *, grace_s: float = GRACE_S) -> Leaks:
        """Do what `compare` does, and let the loop run meanwhile."""
        clock = asyncio.get_running_loop().time
        deadline_s, pause_s = clock() + grace_s, 0.0
        while (leaks := self._new()) and clock() < deadline_s:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s + _POLL_FIRST_S, _POLL_MAX_S)
        return leaks

    def _new(self) -> Leaks:
        return Leaks(
            descriptors=_added(self.descriptors, open_descriptors()),
            threads=_named(
                (t for t in threading.enumerate() if t not in self.threads),
                lambda thread: thread.name,
            ),
            processes=_added(self.processes, child_processes()),
            tasks=_named(
                (t for t in running_tasks() if t not in self.tasks),
                asyncio.Task.get_name,
            ),
        )


def open_descriptors() -> dict[int, str]:
    """Return every open descriptor and its target."""
    if not _FD_TABLE.exists():
        return {}
    targets = {}
    for entry in os.listdir(_FD_TABLE):  # noqa: PTH208  (half the cost of iterdir)
        try:
            targets[int(entry)] = os.readlink(f"{_FD_TABLE}/{entry}")  # noqa: PTH115
        except FileNotFoundError:  # the descriptor that listed the folder
            continue
    return targets


def child_processes() -> dict[int, str]:
    """Return every child process, including dead ones that were not waited for."""
    commands = {}
    for table in Path("/proc/self/task").glob("*/children"):
        try:
            pids = table.read_text().split()
        except OSError:  # the thread has ended
            continue
        commands.update({int(pid): _command(pid) for pid in pids})
    return {
        pid: command
        for pid, command in commands.items()
        if not any(resident in command for resident in _RESIDENT)
    }


def resident_kib(pid: int) -> int:
    """Return the private resident memory of a process; 0 if the process is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:
        return 0
    for line in status.splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    return 0


def running_tasks() -> set[asyncio.Task[object]]:
    """Return the tasks of the running loop, except the current one."""
    try:
        tasks = asyncio.all_tasks()
    except RuntimeError:  # no loop is running
        return set()
    return {task for task in tasks if task is not asyncio.current_task()}


def _command(pid: str) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "gone"
    return b" ".join(words).decode(errors="replace").strip() or "zombie"


def _added(before: Mapping[int, str], after: Mapping[int, str]) -> tuple[str, ...]:
    # Not by number alone: a descriptor may have been closed and its number used again.
    return tuple(
        f"{number} ({description})"
        for number, description in sorted(after.items())
        if before.get(number) != description
    )


def _named(things: Iterable[T], name: Callable[[T], str]) -> tuple[str, ...]:
    return tuple(sorted(name(thing) for thing in things))
