"""Reconnects broken connections, or gives them up.

`machine.reconnect` decides; here are the attempts themselves and their timers.  When to
give up a peer that gives no answer is decided in `liveness`, which ends the control
connection; a lane has a time limit while its peer is heard.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from asyncrpc.core.counters import Counters
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections
from asyncrpc.core.links.disconnected import Discard
from asyncrpc.core.links.liveness import Liveness
from asyncrpc.core.links.machine.reconnect import (
    ADVICE,
    NO_SUCH,
    SUPERSEDED,
    Advice,
    CandidateVerdict,
    Reconnect,
    ReconnectEvent,
    answer_limit_s,
    reason_of_refusal,
    reason_of_verdict,
)
from asyncrpc.core.links.routes import Routes
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    ConnectError,
    ConnectionLostError,
    RefusedError,
    RemoteProtocolError,
    TransportError,
)

if TYPE_CHECKING:
    from asyncrpc.core.links.directory import Directory

logger = logging.getLogger("asyncrpc")


class Broken:
    """A connection that has broken at least once, and what is done about it.

    Attributes:
        connection: the broken one.
        candidate: the connection that is about to bring another transport: it has said
            how much has been read, so nothing more may be read until it is answered.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.machine = Reconnect()
        self.candidate: Connection | None = None

    def release_ended(self) -> None:
        """Make room for another candidate if this one has ended."""
        if self.candidate is not None and self.candidate.ended.done():
            self.release()

    def release(self) -> None:
        """Make room for another candidate."""
        self.candidate = None
        self.machine.on(ReconnectEvent.RELEASE)


class Reconnector:
    """Reconnects the connections of one worker."""

    def __init__(
        self,
        identity: WorkerIdentity,
        scheduler: Scheduler,
        counters: Counters,
        *,
        routes: Routes,
        handshakes: Connections,
        judge: Liveness,
        directory: Directory,
        lost_after_s: float,
    ) -> None:
        self._identity = identity
        self._scheduler = scheduler
        self._counters = counters
        self._routes = routes
        self._handshakes = handshakes
        self._judge = judge
        self._directory = directory
        self._lost_after_s = lost_after_s
        self._broken: dict[Connection, Broken] = {}

    def _of(self, connection: Connection) -> Broken:
        broken = self._broken.get(connection)
        if broken is None:
            broken = self._broken[connection] = Broken(connection)
        return broken

    def forget(self, connection: Connection) -> None:
        """A connection has ended for good."""
        broken = self._broken.pop(connection, None)
        if broken is not None:
            broken.machine.on(ReconnectEvent.END)

    # --- both sides ------------------------------------------------------------------

    def on_broken(self, connection: Connection, error: TransportError | None) -> None:
        """The transport of a connection has broken: reconnect, or give it up."""
        if self._handshakes.is_closing:
            connection.end(error or ConnectionLostError("this worker is shut down"))
            return
        broken = self._of(connection)
        is_lane = connection.ack_through is not connection
        limit_s = self._lost_after_s if is_lane else None
        broken.machine.on_broken(self._scheduler.loop.time(), limit_s)
        self._directory.set_broken(connection, broken=True)
        logger.info(
            "worker %r: the connection to %s broke (%s); it is resumed",
            self._identity.name,
            connection.where,
            error or "it ended without a reason",
        )
        self._judge.on_broken(connection)
        if connection.is_broken:  # else it was given up at once
            self._scheduler.start_task(self._reconnect(broken, error))

    async def _reconnect(self, broken: Broken, error: TransportError | None) -> None:
        """Resume a broken connection, or end it."""
        connection, control = broken.connection, broken.connection.ack_through
        if connection is not control and connection.role is Role.ACCEPTOR:
            attempt_number = broken.machine.attempt
            control.send(FrameKind.LANE_BROKEN, connection.token, aux=attempt_number)
        attempts: set[asyncio.Task[str]] = set()
        try:
            reason = await self._until_settled(broken, attempts)
        finally:
            for attempt in attempts:
                attempt.cancel()
        if reason and connection.is_broken:
            why = str(error) if error is not None else "the connection broke"
            connection.end(ConnectionLostError(f"{why}; {reason}"))

    async def _until_settled(
        self, broken: Broken, attempts: set[asyncio.Task[str]]
    ) -> str:
        """Try until a connection is whole, or return why it is lost."""
        connection, machine = broken.connection, broken.machine
        start_task = self._scheduler.start_task
        attempt = self._redial if connection.role is Role.DIALER else self._ask
        while connection.is_broken:
            broken.release_ended()
            if machine.may_try(len(attempts)):
                attempts.add(start_task(attempt(broken)))
            settled = start_task(connection.resumption.settled())
            done, _ = await asyncio.wait(
                {*attempts, settled},
                timeout=machine.pause_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            settled.cancel()
            for ended_attempt in attempts & done:
                attempts.discard(ended_attempt)
                if not ended_attempt.cancelled() and ended_attempt.result():
                    return ended_attempt.result()
            if done and connection.is_broken:
                await asyncio.sleep(machine.pause_s)
            reason = self._on_pause_over(broken)
            if reason:
                return reason
        return ""

    def _on_pause_over(self, broken: Broken) -> str:
        control = broken.connection.ack_through
        is_excused = control.is_broken or self._judge.is_silent(control)
        now_s = self._scheduler.loop.time()
        return broken.machine.on_pause_over(now_s, is_excused=is_excused)

    def on_peer_broken(self, connection: Connection, attempt: int) -> None:
        """A lane that this worker dials has broken at the peer: dial it again.

        Nothing is written to an idle lane, so here there may be no sign of it.
        """
        if self._of(connection).machine.is_broken_since(attempt):
            connection.resumption.break_off("it has broken at the peer")

    def try_another_way(self, connection: Connection) -> None:
        """Dial again although a connection is not broken: nothing comes over it.

        Until the peer can be reached anew the old transport may still bring something.
        """
        if connection.role is not Role.DIALER:
            return
        broken = self._of(connection)
        if broken.machine.probe():
            task = self._scheduler.start_task(self._redial(broken))
            task.add_done_callback(lambda _: broken.machine.on_probed())

    def _routes_to(self, connection: Connection) -> list[Address]:
        """Return where a connection can be dialed again: first where it was."""
        control = connection.ack_through
        name = control.peer.name if control.peer is not None else ""
        routes = self._routes.to(self._directory.member(name))
        if connection.address is not None:
            routes = [route for route in routes if route != connection.address]
            routes.insert(0, connection.address)
        return routes

    # --- the side that dialed --------------------------------------------------------

    async def _redial(self, broken: Broken) -> str:
        """Try to resume a connection; return why it is lost, empty if it may resume."""
        connection = broken.connection
        try:
            async with asyncio.timeout(self._routes.timeout_s):
                dialled = await self._routes.connect(
                    self._routes_to(connection), lambda: self._new_candidate(broken)
                )
                hello = await dialled.handler.until_open()
        except RefusedError as error:
            evidence = await self._judge.evidence(connection.ack_through)
            return reason_of_refusal(evidence, str(error))
        except AuthenticationError as error:
            # A guest's token may have ended.  A secret does not end: another process
            # may have taken the address for now.
            return "" if self._routes.gateway is None else str(error)
        except RemoteProtocolError as error:
            return str(error)
        except (TransportError, TimeoutError):
            return ""
        return reason_of_verdict(hello.verdict)

    def _new_candidate(self, broken: Broken) -> Connection:
        """Make the connection that is to bring another transport."""
        begun_s = self._scheduler.loop.time()

        def introduce(candidate: Connection) -> None:
            self._claim(broken, candidate, begun_s)

        def on_answer(candidate: Connection, hello: Hello) -> None:
            self._on_answer(broken, candidate, hello)

        # Who only listens at a stale address must not keep a worker from resuming.
        return self._handshakes.make(
            Role.DIALER, introduce, on_answer, is_cautious=True
        )

    def _claim(self, broken: Broken, candidate: Connection, begun_s: float) -> None:
        """Ask the peer to go on over a candidate's transport, if it is the first."""
        target, loop = broken.connection, self._scheduler.loop
        broken.release_ended()
        if broken.machine.reads_on:
            target.resumption.break_off("another transport takes the place of this one")
        attempt = broken.machine.claim()
        if not attempt:
            candidate.fail(ConnectError("another attempt to resume is further along"))
            return
        broken.candidate = candidate
        name = target.peer.name if target.peer is not None else ""
        candidate.hello(
            self._identity.hello(
                expects=name,
                attempt=attempt,
                resume=target.token,
                received=target.received,
            )
        )
        limit_s = answer_limit_s(loop.time() - begun_s)
        loop.call_later(limit_s, self._on_no_answer, broken, candidate)

    def _on_answer(self, broken: Broken, candidate: Connection, hello: Hello) -> None:
        if not self._handshakes.is_trusted(candidate):
            return
        target = broken.connection
        peer = target.peer
        answer = broken.machine.on_answer(
            hello.verdict,
            is_same_life=peer is not None and peer.is_of(hello),
            is_candidate=broken.candidate is candidate,
        )
        match answer:
            case CandidateVerdict.RESUME:
                self._resume(broken, candidate, hello)
            case CandidateVerdict.LATE:
                candidate.fail(ConnectError(SUPERSEDED))
            case CandidateVerdict.REFUSED | CandidateVerdict.REPLACED:
                candidate.open_to(SILENT)
                candidate.close()
        if answer is CandidateVerdict.REPLACED:
            target.end(ConnectionLostError("another worker has taken the peer's place"))

    @staticmethod
    def _on_no_answer(broken: Broken, candidate: Connection) -> None:
        """Make room for another candidate: this one has got no answer to its HELLO."""
        if broken.candidate is candidate:
            broken.release()
            candidate.fail(ConnectError("no answer to the attempt to resume"))

    def _resume(self, broken: Broken, candidate: Connection, hello: Hello) -> None:
        """Let a connection go on over the transport of another."""
        target = broken.connection
        broken.release()
        transport = candidate.release_transport()
        try:
            target.resumption.adopt(transport, hello.received)
        except AsyncRpcError as error:
            transport.abort()
            target.end(error)
            return
        broken.machine.on(ReconnectEvent.RESUMED)
        self._directory.set_broken(target, broken=False)
        target.resumption.mended.set()
        self._judge.on_resumed(target)
        self._counters.connections_resumed += 1

    # --- the side that was dialed ----------------------------------------------------

    async def _ask(self, broken: Broken) -> str:
        """Return why a connection will not be resumed; empty if it may yet resume."""
        connection = broken.connection
        evidence = await self._judge.evidence(connection.ack_through)
        advice = ADVICE[evidence]
        if advice is not Advice.KNOCK:
            return evidence.value if advice is Advice.GIVE_UP else ""
        try:
            async with asyncio.timeout(self._routes.timeout_s):
                dialled = await self._routes.connect(
                    self._routes_to(connection), Discard
                )
            dialled.transport.abort()
        except RefusedError as error:
            return reason_of_refusal(evidence, str(error))
        except (TransportError, TimeoutError):
            return ""
        return ""

    def on_offer(self, candidate: Connection, hello: Hello) -> None:
        """A worker dials to resume a connection."""
        target = None if self._handshakes.is_closing else self._resumable(hello)
        if target is None:
            self._handshakes.refuse(candidate, NO_SUCH)
            return
        broken = self._of(target)
        verdict = broken.machine.on_offer(hello.attempt)
        if verdict:
            self._handshakes.refuse(candidate, verdict)
            return
        target.resumption.break_off("the peer resumes the connection")
        ours = self._identity.hello(resume=target.token, received=target.received)
        candidate.hello(ours)
        self._resume(broken, candidate, hello)

    def _resumable(self, hello: Hello) -> Connection | None:
        """Return the connection that a dialer means, if it is there."""
        for connection in self._handshakes.live:
            peer = connection.peer
            if (
                connection.role is Role.ACCEPTOR
                and connection.on_broken is not None
                and connection.token == hello.resume
                and peer is not None
                and peer.is_of(hello)
            ):
                return connection
        return None
