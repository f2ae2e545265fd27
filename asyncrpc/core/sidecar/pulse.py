"""A pulse: a record in memory that names a worker and says when its loop last ran.

It lies in an anonymous file.  A process that may inspect the worker's process can open
it by `/proc/PID/fd/N`, and the sidecar inherits it; when both have ended nothing is
left.  What the kernel says of the process comes first; the pulse only tells a loop that
runs from one that does not.

Source: proc_pid_stat(5), memfd_create(2).
"""

from __future__ import annotations

import os
import struct

TICK_S = 0.5  # how often a loop writes that it runs
FRESH_S = 2.0  # until then it is believed; some late ticks of a busy machine included

# What is known of a process: one byte of an answer, see `query`.
GONE = 1
STOPPED = 2
BUSY = 3
TICKING = 4
UNKNOWN = 5

_RECORD = struct.Struct("=4sI5Q")
_MAGIC = b"ARPL"
_VERSION = 1
PULSE_BYTES = _RECORD.size
TICKED = 5  # index of the time, if the record is read as an array of 64-bit numbers

NAME = "asyncrpc-pulse"
_NS_PER_S = 1_000_000_000
# Fields of /proc/PID/stat, counted from the one after the name in parentheses.
_STATE, _THREADS, _STARTED = 0, 17, 19


class Pulse:
    """The content of a pulse.

    Attributes:
        pid: of the worker's process.
        started: when it was started, in the kernel's ticks since boot; a later process
            of the same id differs in it.
        namespace: inode of the pid namespace in which `pid` counts.
        ticked_ns: when the loop last wrote it: nanoseconds of CLOCK_MONOTONIC.
    """

    __slots__ = ("incarnation", "namespace", "pid", "started", "ticked_ns")

    def __init__(
        self,
        pid: int,
        started: int,
        incarnation: int,
        namespace: int,
        ticked_ns: int = 0,
    ) -> None:
        self.pid = pid
        self.started = started
        self.incarnation = incarnation
        self.namespace = namespace
        self.ticked_ns = ticked_ns

    def pack(self) -> bytes:
        """Return the record."""
        return _RECORD.pack(
            _MAGIC,
            _VERSION,
            self.pid,
            self.started,
            self.incarnation,
            self.namespace,
            self.ticked_ns,
        )


def read(descriptor: int) -> Pulse | None:
    """Return the pulse in a descriptor's file; None if the file is not a pulse."""
    record = os.pread(descriptor, PULSE_BYTES, 0)
    if len(record) != PULSE_BYTES:
        return None
    magic, version, *values = _RECORD.unpack(record)
    if magic != _MAGIC or version != _VERSION:
        return None
    return Pulse(*values)


def read_of(pid: int, number: int) -> Pulse | None:
    """Return the pulse that a process has open as descriptor `number`.

    None if the file is not a pulse, or this process may not look.
    """
    path = f"/proc/{pid}/fd/{number}"
    try:
        # To open something else, such as a device, could have an effect.
        if not os.readlink(path).startswith(f"/memfd:{NAME}"):  # noqa: PTH115
            return None
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        return read(descriptor)
    finally:
        os.close(descriptor)


def stat_of(pid: int) -> list[bytes]:
    """Return what the kernel says of a process, from its state on."""
    descriptor = os.open(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    try:
        # The name may hold anything, parentheses too, but nothing after it does.
        return os.read(descriptor, 4096).rpartition(b")")[2].split()
    finally:
        os.close(descriptor)


def started_at(pid: int) -> int:
    """Return when a process was started, in the kernel's ticks since boot."""
    return int(stat_of(pid)[_STARTED])


def pid_namespace() -> int:
    """Return the inode of the pid namespace that this process is in."""
    return os.stat("/proc/self/ns/pid").st_ino  # noqa: PTH116  (no pathlib here)


def is_gone(pid: int) -> bool:
    """Return whether there is certainly no process of this id.

    /proc may hide one (its option hidepid); the system call does not.
    """
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return False


def state_of(pid: int, started: int | None) -> int:
    """Return a process's state: GONE, STOPPED, or BUSY if it can run.

    Args:
        started: when it was started; None: whichever has the id is meant.
    """
    try:
        stat = stat_of(pid)
        state, threads = stat[_STATE], int(stat[_THREADS])
        is_another = started is not None and int(stat[_STARTED]) != started
    except (OSError, IndexError, ValueError):
        return GONE if is_gone(pid) else UNKNOWN
    if is_another or state in (b"X", b"x"):
        return GONE
    if state == b"Z" and threads <= 1:  # else only its first thread has ended
        return GONE
    return STOPPED if state in (b"T", b"t") else BUSY


def judge(pulse: Pulse | None, state: int, now_ns: int) -> int:
    """Return the state of a process; if it can run, its pulse decides."""
    if state != BUSY:
        return state
    if pulse is None:
        return UNKNOWN
    is_fresh = now_ns - pulse.ticked_ns <= FRESH_S * _NS_PER_S
    return TICKING if is_fresh else BUSY
