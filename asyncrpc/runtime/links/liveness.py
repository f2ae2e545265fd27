"""Liveness: which peers are alive, judged by what is heard of them and of their hosts.

One timer for all links of a worker.  What is decided is in `machine.detector`; what
became of a process, in `watching`.  Nothing here runs for a message: that something has
come is seen from the connection's count of reads.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import ConnectionLostError
from asyncrpc.runtime.links.watching import evidence_of
from asyncrpc.runtime.machine.detector import Action, Detector, Evidence, Verdict
from asyncrpc.wire.frames import FrameKind

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

EVIDENCE_S: Final = 2.0  # how long another host may take to answer for one of its own
# Less than this is not acknowledged by itself: or ACKs would be answered by ACKs.
NEWS_BYTES: Final = 1 << 10
# If the peer's process runs, or nobody can tell, its silence may be the connection's.
_MAY_BE_THE_NETWORK: Final = frozenset(
    {Evidence.TICKING, Evidence.UNKNOWN, Evidence.UNREACHABLE}
)


class _Watched:
    """A link, and what is thought of its peer."""

    def __init__(self, link: Link, detector: Detector) -> None:
        self.link = link
        self.detector = detector
        self.reads = 0  # of its connections when last looked at
        self.asking: asyncio.Task[None] | None = None


class Liveness:
    """Judges the peers of one worker."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._watched: dict[Connection, _Watched] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tick_s = 0.0

    def watch(self, link: Link) -> None:
        """Judge the peer of an open link until `forget`."""
        options = self._worker.options
        detector = Detector(
            self._worker.loop.time(),
            heartbeat_s=options.heartbeat_s,
            lost_after_s=options.lost_after_s,
        )
        self._tick_s = detector.tick_s
        self._watched[link.connection] = _Watched(link, detector)
        if self._timer is None:
            self._timer = self._worker.loop.call_later(self._tick_s, self._tick)

    def forget(self, connection: Connection) -> None:
        """Stop judging a link that has ended."""
        watched = self._watched.pop(connection, None)
        if watched is not None and watched.asking is not None:
            watched.asking.cancel()
        if not self._watched and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Judge nobody any more."""
        for connection in tuple(self._watched):
            self.forget(connection)

    def on_broken(self, connection: Connection) -> None:
        """The connection of a link has broken; another may take its place."""
        watched = self._watched.get(connection)
        if watched is not None:
            now_s = self._worker.loop.time()
            self._act(watched, watched.detector.on_break(now_s))

    def on_resumed(self, connection: Connection) -> None:
        """It has."""
        watched = self._watched.get(connection)
        if watched is not None:
            watched.detector.on_resumed(self._worker.loop.time())

    def is_silent(self, connection: Connection) -> bool:
        """Say whether the peer is suspected of being dead."""
        watched = self._watched.get(connection)
        return watched is not None and watched.detector.verdict is Verdict.SUSPECT

    def _tick(self) -> None:
        now_s = self._worker.loop.time()
        self._timer = self._worker.loop.call_later(self._tick_s, self._tick)
        for watched in tuple(self._watched.values()):
            connection, detector = watched.link.connection, watched.detector
            reads = connection.reads
            if reads != watched.reads:
                watched.reads = reads
                detector.on_receipt(now_s)
                connection.acknowledge(NEWS_BYTES)
            if connection.lanes is not None and connection.lanes.lanes:
                connection.lanes.acknowledge()
            self._act(watched, detector.on_tick(now_s))

    def _act(self, watched: _Watched, action: Action) -> None:
        connection = watched.link.connection
        if action is Action.SEND_PING:
            connection.send(FrameKind.PING, 0)
        elif action is Action.ASK_EVIDENCE:
            watched.asking = self._worker.start_task(self._ask(watched))
        elif action is Action.LOST:
            connection.end(ConnectionLostError(watched.detector.reason))

    async def _ask(self, watched: _Watched) -> None:
        evidence = await self.evidence(watched.link.connection)
        connection, detector = watched.link.connection, watched.detector
        if connection not in self._watched:
            return
        verdict = detector.on_evidence(self._worker.loop.time(), evidence)
        watched.asking = None
        if verdict is Verdict.LOST:
            connection.end(ConnectionLostError(detector.reason))
        elif verdict is Verdict.SUSPECT and evidence in _MAY_BE_THE_NETWORK:
            self._worker.directory.try_another_way(connection)

    async def evidence(self, connection: Connection) -> Evidence:
        """Ask what became of the process at the other end of a control connection."""
        hello, credentials = connection.peer, connection.credentials
        if hello is None or connection.scheme == "mem":
            return Evidence.UNKNOWN
        return await evidence_of(
            hello,
            credentials_pid=None if credentials is None else credentials.pid,
            secret=self._worker.options.secret_bytes,
            timeout_s=EVIDENCE_S,
        )
