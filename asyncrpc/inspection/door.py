"""A local socket through which to look at a worker whose event loop does not run.

A thread of the worker sleeps at a Unix socket in the abstract namespace.  It tells
every process that connects, and that runs as the same user, what the worker does.  It
needs the interpreter but not the loop.  A process that gets no answer learns from the
kernel what has become of the worker's process: see `look_beside`.

Source: unix(7), SO_PEERCRED; proc_pid_stat(5).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple

import msgpack

from asyncrpc.errors import MalformedError
from asyncrpc.inspection.collecting import Inspected
from asyncrpc.inspection.collective_records import CollectiveHistory
from asyncrpc.inspection.loop_state import blocked_for_s
from asyncrpc.inspection.records import NoAnswer, Trouble, WorkerSnapshot
from asyncrpc.runtime.membership.messages import MemberRecord
from asyncrpc.runtime.schema import RecordSchema
from asyncrpc.shortage import shortage_of
from asyncrpc.sidecar import pulse
from asyncrpc.transport.sockets import peer_credentials

logger = logging.getLogger("asyncrpc")

is_supported: Final = hasattr(socket, "SO_PEERCRED")
ANSWER_S: Final = 2.0  # for the interpreter of the other process to answer
_CLIENT_S: Final = 5.0  # for the asking process to take the answer
_BYTES_MAX: Final = 64 << 20
ADDRESSES_MAX: Final = 16  # of one worker
_ACCEPT_PAUSE_S: Final = 0.1  # when this process has no descriptor left


class Look(NamedTuple):
    """What a worker tells through its local socket.

    Attributes:
        collectives: the last ones, and those under way.
    """

    snapshot: WorkerSnapshot
    members: list[MemberRecord]
    collectives: CollectiveHistory | None


_LOOK: Final = RecordSchema(Look)


def names_of(incarnation: int, addresses: Iterable[str]) -> list[str]:
    """Return the names of a worker's local socket: by incarnation, and by address."""
    by_address = map(_name_by, islice(addresses, ADDRESSES_MAX))
    return [f"asyncrpc-look/{incarnation:016x}", *by_address]


def _name_by(address: str) -> str:
    scheme, _, rest = address.partition("://")
    place = rest.rpartition(":")[2] if scheme == "tcp" else rest
    return f"asyncrpc-look/{scheme}/{place}"


class LocalDoor:
    """The local socket of one worker."""

    def __init__(
        self,
        worker: Inspected,
        *,
        take: Callable[[float], WorkerSnapshot],
        collectives: Callable[[], CollectiveHistory],
        members: Callable[[], list[Any]],
        ticked_ns: Callable[[], int | None],
    ) -> None:
        """Prepare to listen.

        Args:
            take: takes its snapshot, given how long its loop has not run.
            collectives: returns its last collectives.
            members: returns the records of the members that it knows.
            ticked_ns: returns when its loop last ran, in nanoseconds; None: unknown.
        """
        self._worker = worker
        self._take = take
        self._collectives = collectives
        self._members = members
        self._ticked_ns = ticked_ns
        self._listening: list[socket.socket] = []
        self._is_closed = False

    def open(self, addresses: Iterable[str]) -> None:
        """Listen.  A name that cannot be used is skipped without an error."""
        for name in dict.fromkeys(
            names_of(self._worker.identity.incarnation, addresses)
        ):
            try:
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:  # no descriptor is left
                logger.warning(
                    "cannot listen at %s: %s", name, shortage_of(error) or error
                )
                break
            try:
                listening.bind(f"\0{name}")
                listening.listen()
            except OSError as error:  # another worker, of this process or with the
                listening.close()  # same address in another namespace, has the name
                logger.debug("cannot listen at %s: %s", name, error)
                continue
            self._listening.append(listening)
        if self._listening:
            threading.Thread(
                target=self._answer_all, name="asyncrpc-door", daemon=True
            ).start()

    def close(self) -> None:
        """Stop listening; the thread ends."""
        self._is_closed = True
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _answer_all(self) -> None:
        """Answer all connections, one after the other, until `close`."""
        doors, poll = self._listening, select.poll()
        for door in doors:
            poll.register(door.fileno(), select.POLLIN)
        by_number = {door.fileno(): door for door in doors}
        while not self._is_closed:
            for number, _ in poll.poll():
                if not self._is_closed:
                    try:
                        self._answer(by_number[number])
                    except Exception:
                        logger.exception("could not answer a look at this worker")
        for door in doors:
            door.close()

    def _answer(self, door: socket.socket) -> None:
        try:
            asking, _ = door.accept()
        except OSError:  # this process may have no descriptor left
            threading.Event().wait(_ACCEPT_PAUSE_S)
            return
        with asking, contextlib.suppress(OSError):
            asking.settimeout(_CLIENT_S)
            peer = peer_credentials(asking)
            if peer is not None and peer.uid in (os.getuid(), 0):
                asking.sendall(self._told())

    def _told(self) -> bytes:
        snapshot = self._take(blocked_for_s(self._worker.loop, self._ticked_ns()))
        packed: bytes = msgpack.packb(
            _LOOK.write(Look(snapshot, self._members(), self._collectives()))
        )
        return packed


def look_beside(
    names: Sequence[str], *, timeout_s: float = ANSWER_S
) -> Look | NoAnswer:
    """Look at a worker of this host through its local socket; blocks this thread.

    Args:
        timeout_s: seconds that its interpreter has to answer.
    """
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as door:
            door.settimeout(timeout_s)
            try:
                door.connect(f"\0{name}")
            except OSError:
                continue
            peer = peer_credentials(door)
            if peer is None or (os.getuid() not in (peer.uid, 0) and peer.uid):
                continue  # a process of another user has taken the name
            try:
                told = msgpack.unpackb(_all_of(door))
                look: Look = _LOOK.read_as("a look", told)
            except (OSError, ValueError, MalformedError):
                return _no_answer_of(peer.pid)
            return look
    return NoAnswer(Trouble.GONE, "no process on this host has its local socket")


def _all_of(door: socket.socket) -> bytes:
    parts, size = [], 0
    while more := door.recv(1 << 16):
        parts.append(more)
        size += len(more)
        if size > _BYTES_MAX:
            raise ValueError("too long")
    return b"".join(parts)


def _no_answer_of(pid: int) -> NoAnswer:
    """Return why a process that has the socket does not answer there."""
    try:
        stat = pulse.stat_of(pid)
    except OSError:
        return NoAnswer(Trouble.GONE, f"process {pid} has ended")
    if stat[0] in (b"T", b"t"):
        return NoAnswer(
            Trouble.STOPPED, f"process {pid}: `kill -CONT {pid}` resumes it"
        )
    state = "uses a processor" if stat[0] == b"R" else "waits in the kernel"
    return NoAnswer(
        Trouble.HELD,
        f"process {pid} {state}; `py-spy dump --native -p {pid}` shows where",
    )
