"""Liveness: which peers are alive, judged by their messages and by their hosts.

One timer for all links of a worker.  What is decided is in `machine.detector`; what
became of a process, in `evidence`.  Nothing here runs for a message: that something has
come is seen from the connection's count of reads.  A connection that has brought
nothing since the timer was last due gives back memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.evidence import evidence_at, evidence_of, evidence_of_pid
from asyncrpc.core.links.machine.detector import (
    Detector,
    Evidence,
    SilenceAction,
    Verdict,
)
from asyncrpc.core.links.sidecar import Sidecar
from asyncrpc.core.members import Member
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.wire.frames import FrameKind, Hello, prefix
from asyncrpc.errors import ConnectionLostError

EVIDENCE_S: Final = 2.0  # for another host to answer about a process of its own
# Less than this is not acknowledged by itself: or ACKs would be answered by ACKs.
NEWS_BYTES: Final = 1 << 10
_PING: Final = prefix(FrameKind.PING)
# If the peer's process runs, or is not known, its silence may be the connection's.
_MAY_BE_THE_NETWORK: Final = frozenset(
    {Evidence.TICKING, Evidence.UNKNOWN, Evidence.UNREACHABLE}
)


class _Judged:
    """A link, and the judgement of its peer."""

    def __init__(self, connection: Connection, detector: Detector) -> None:
        self.connection = connection
        self.detector = detector
        self.reads = 0  # of its connections when last looked at
        self.rests = False  # nothing has come since it gave back memory
        self.asking: asyncio.Task[None] | None = None


class Liveness:
    """Judges the peers of one worker.

    Attributes:
        on_network_suspected: called with the connection to a peer that is silent
            although its process may run.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        sidecar: Sidecar,
        *,
        heartbeat_s: float,
        lost_after_s: float,
        secret: bytes | None,
    ) -> None:
        """Prepare.

        Args:
            secret: the cluster's; the sidecars of peers answer only if it is right.
        """
        self.on_network_suspected: Callable[[Connection], None] | None = None
        self._scheduler = scheduler
        self._sidecar = sidecar
        self._heartbeat_s = heartbeat_s
        self._lost_after_s = lost_after_s
        self._secret = secret
        self._judged: dict[Connection, _Judged] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._tick_s = 0.0

    def judge(self, connection: Connection, hello: Hello) -> None:
        """Judge the peer of an open link until `forget`."""
        loop = self._scheduler.loop
        detector = Detector(
            loop.time(),
            heartbeat_s=self._heartbeat_s,
            lost_after_s=self._lost_after_s,
        )
        self._tick_s = detector.tick_s
        self._judged[connection] = _Judged(connection, detector)
        if self._timer is None:
            self._timer = loop.call_later(self._tick_s, self._tick)
        self._sidecar.on_peer(hello)

    def forget(self, connection: Connection) -> None:
        """Stop judging a link that has ended."""
        judged = self._judged.pop(connection, None)
        if judged is not None and judged.asking is not None:
            judged.asking.cancel()
        if not self._judged and self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def close(self) -> None:
        """Stop judging peers."""
        for connection in tuple(self._judged):
            self.forget(connection)

    def on_broken(self, connection: Connection) -> None:
        """The connection of a link has broken; another may take its place."""
        judged = self._judged.get(connection)
        if judged is not None:
            now_s = self._scheduler.loop.time()
            self._act(judged, judged.detector.on_break(now_s))

    def on_resumed(self, connection: Connection) -> None:
        """Another connection has taken the place of the broken one."""
        judged = self._judged.get(connection)
        if judged is not None:
            judged.detector.on_resumed(self._scheduler.loop.time())

    def is_silent(self, connection: Connection) -> bool:
        """Return whether the peer is suspected of being dead."""
        judged = self._judged.get(connection)
        return judged is not None and judged.detector.verdict is Verdict.SUSPECT

    def _tick(self) -> None:
        now_s = self._scheduler.loop.time()
        self._timer = self._scheduler.loop.call_later(self._tick_s, self._tick)
        for judged in tuple(self._judged.values()):
            connection, detector = judged.connection, judged.detector
            reads = connection.reads
            if reads != judged.reads:
                judged.reads = reads
                judged.rests = False
                detector.on_receipt(now_s)
                connection.acknowledge(NEWS_BYTES)
            elif not judged.rests:
                judged.rests = True
                connection.incoming.rest()
            if connection.lanes is not None and connection.lanes.lanes:
                connection.lanes.acknowledge()
            self._act(judged, detector.on_tick(now_s))

    def _act(self, judged: _Judged, action: SilenceAction) -> None:
        connection = judged.connection
        if action is SilenceAction.SEND_PING:
            connection.stream.write_apart(_PING)
        elif action is SilenceAction.ASK_EVIDENCE:
            judged.asking = self._scheduler.start_task(self._ask(judged))
        elif action is SilenceAction.LOST:
            connection.end(ConnectionLostError(judged.detector.reason))

    async def _ask(self, judged: _Judged) -> None:
        evidence = await self.evidence(judged.connection)
        connection, detector = judged.connection, judged.detector
        if connection not in self._judged:
            return
        verdict = detector.on_evidence(self._scheduler.loop.time(), evidence)
        judged.asking = None
        if verdict is Verdict.LOST:
            connection.end(ConnectionLostError(detector.reason))
            return
        may_be_network = verdict is Verdict.SUSPECT and evidence in _MAY_BE_THE_NETWORK
        if may_be_network and self.on_network_suspected is not None:
            self.on_network_suspected(connection)

    async def evidence(self, connection: Connection) -> Evidence:
        """Ask what became of the process at the other end of a control connection."""
        hello, credentials = connection.peer, connection.credentials
        if hello is None or connection.scheme == "mem":
            return Evidence.UNKNOWN
        return await evidence_of(
            hello,
            credentials_pid=None if credentials is None else credentials.pid,
            secret=self._secret,
            timeout_s=EVIDENCE_S,
        )

    async def evidence_of_unmet(self, member: Member, listener_pid: int) -> Evidence:
        """Ask what became of the process of a peer that has not introduced itself.

        Args:
            listener_pid: the process that listens at its Unix socket; 0: not known.
        """
        if listener_pid:
            return evidence_of_pid(listener_pid)
        return await evidence_at(
            member.addresses,
            member.incarnation,
            secret=self._secret,
            timeout_s=EVIDENCE_S,
        )
