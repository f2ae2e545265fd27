"""A look at a worker of this host through its local socket, and what it answers there.

A process that gets no answer learns from the kernel what has become of the worker's
process.

Source: proc_pid_stat(5).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from typing import Final, NamedTuple

import msgpack

from asyncrpc.core.membership.messages import MemberRecord
from asyncrpc.core.parts import Parts
from asyncrpc.core.sidecar import pulse
from asyncrpc.core.transport.sockets import peer_credentials
from asyncrpc.errors import MalformedError
from asyncrpc.extend import RecordSchema
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.collective_records import CollectiveHistory
from asyncrpc.tools.inspection.histories import history_of
from asyncrpc.tools.inspection.loop_state import blocked_for_s
from asyncrpc.tools.inspection.records import NoAnswer, Trouble, WorkerSnapshot

ANSWER_S: Final = 2.0  # for the interpreter of the other process to answer
ENDED_MAX: Final = 200  # collectives in a look, which always tells the last ones
_BYTES_MAX: Final = 64 << 20


class Look(NamedTuple):
    """What a worker tells through its local socket.

    Attributes:
        snapshot: of the worker.
        members: the members that it knows.
        collectives: the last ones, and those under way.
    """

    snapshot: WorkerSnapshot
    members: list[MemberRecord]
    collectives: CollectiveHistory | None


_LOOK: Final = RecordSchema(Look)


def packed_look(worker: Parts, ages: WaitAges) -> bytes:
    """Return what a worker answers at its local socket.

    Thread safety: from any thread but that of the worker's loop.
    """
    silent_s = blocked_for_s(worker.loop, worker.sidecar.ticked_ns)
    snapshot = snapshot_of(worker, ages, is_thorough=True, blocked_for_s=silent_s)
    history = history_of(worker, ended_max=ENDED_MAX)
    look = Look(snapshot, worker.membership.table.records, history)
    packed: bytes = msgpack.packb(_LOOK.write(look))
    return packed


def look_beside(
    names: Sequence[str], *, timeout_s: float = ANSWER_S
) -> Look | NoAnswer:
    """Look at a worker of this host through its local socket; blocks this thread."""
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
                unpacked = msgpack.unpackb(_all_of(door))
                look: Look = _LOOK.read_as("a look", unpacked)
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
