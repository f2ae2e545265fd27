"""Reconnecting: how a link outlives its connections, and when it is given up.

A connection that breaks waits for another transport.  Whoever dialed it dials again, at
once and then ever more slowly; the other end waits, and asks meanwhile whether there is
still anybody to wait for.  So a worker that has died is known to be lost within
milliseconds where its host can be asked, and a network that comes back within
`Options.lost_after_s` has only cost time.

A connection is resumed at both ends or at none: the acceptor that has given it up
refuses the dial, and so the dialer gives it up too.
"""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from typing import TYPE_CHECKING, Final

from asyncrpc.errors import (
    AsyncRpcError,
    ConnectError,
    ConnectionLostError,
    RefusedError,
    RemoteProtocolError,
    TransportError,
)
from asyncrpc.runtime.links.disconnected import Discard
from asyncrpc.runtime.machine.detector import Evidence
from asyncrpc.runtime.payloads.lane_dialing import SILENT, LaneDialing
from asyncrpc.transport.dial import connect_any
from asyncrpc.wire.handshake import Role

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.links.liveness import Liveness
    from asyncrpc.transport.address import Address
    from asyncrpc.wire.messages import Hello

logger = logging.getLogger("asyncrpc")

# Between two attempts: doubled from the first to the last.
FIRST_PAUSE_S: Final = 0.01
LAST_PAUSE_S: Final = 2.0
ATTEMPTS_MAX: Final = 4  # at the same time
ANSWER_S: Final = 1.0  # for an answer to HELLO, beside three times what came before it
NO_SUCH: Final = "it has given up this connection"
SUPERSEDED: Final = "a later attempt has come before this one"
# What speaks against the death of a peer at whose address nobody listens.
_RUNS: Final = frozenset({Evidence.BUSY, Evidence.TICKING, Evidence.STOPPED})


class Reconnecting(LaneDialing):
    """The part of a `Directory` that mends connections."""

    _liveness: Liveness
    _trying: set[Connection]

    @abstractmethod
    def _control_of(self, connection: Connection) -> Connection:
        """Return the connection that a lane belongs to, or the connection itself."""

    @abstractmethod
    def _set_broken(self, connection: Connection, *, broken: bool) -> None:
        """Have new calls wait while the connection to their peer is broken."""

    def allow_resuming(self, connection: Connection, link: Link) -> None:
        """Let an open connection outlive its transport."""
        connection.allow_resuming(self._on_broken, lambda: link.pending.next_id)

    def _on_broken(self, connection: Connection, error: TransportError | None) -> None:
        """The transport of a connection has broken: mend it, or give it up."""
        if self._closing:
            connection.end(error or ConnectionLostError("this worker is shut down"))
            return
        self._set_broken(connection, broken=True)
        logger.info(
            "worker %r: the connection to %s broke (%s); it is resumed",
            self._worker.name,
            connection.where,
            error or "it ended without a word",
        )
        self._liveness.on_broken(connection)
        if not connection.is_broken:  # given up at once
            return
        self._worker.start_task(self._mend(connection, error))

    async def _mend(self, connection: Connection, error: TransportError | None) -> None:
        """Have a broken connection resumed, or end it.

        When to give up a peer that gives no answer is decided in `liveness`, which ends
        the control connection; a lane has a time limit while its peer is heard.
        """
        attempts: set[asyncio.Task[str]] = set()
        try:
            reason = await self._mend_within(connection, attempts)
        finally:
            for attempt in attempts:
                attempt.cancel()
        if reason and connection.is_broken:
            broke = str(error) if error is not None else "the connection broke"
            connection.end(ConnectionLostError(f"{broke}; {reason}"))

    async def _mend_within(
        self, connection: Connection, attempts: set[asyncio.Task[str]]
    ) -> str:
        """Try until a connection is whole, or return why it is lost.

        An attempt may hang where the next one gets through, and on a slow network one
        takes longer than the pause to the next: so several are under way.
        """
        loop, limit_s = self._worker.loop, self._worker.options.lost_after_s
        control = self._control_of(connection)
        since_s, pause_s = loop.time(), FIRST_PAUSE_S
        attempt = self._redial if connection.role is Role.DIALER else self._ask
        while connection.is_broken:
            bearer = connection.bearer
            is_near = bearer is not None and not bearer.ended.done()
            if len(attempts) < ATTEMPTS_MAX and not is_near:
                attempts.add(self._worker.start_task(attempt(connection)))
            settled = self._worker.start_task(connection.settled())
            done, _ = await asyncio.wait(
                {*attempts, settled},
                timeout=pause_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
            settled.cancel()
            for one in attempts & done:
                attempts.discard(one)
                if not one.cancelled() and one.result():
                    return one.result()
            if done and connection.is_broken:
                await asyncio.sleep(pause_s)
            if connection is not control:
                if control.is_broken or self._liveness.is_silent(control):
                    since_s = loop.time()
                if loop.time() - since_s >= limit_s:
                    return f"it could not be resumed in {limit_s:g} s"
            pause_s = min(2 * pause_s, LAST_PAUSE_S)
        return ""

    def try_another_way(self, connection: Connection) -> None:
        """Dial again although a connection is not broken: nothing comes over it.

        Until the peer can be reached anew the old transport may still bring something.
        """
        if connection.role is Role.DIALER and connection not in self._trying:
            self._trying.add(connection)
            task = self._worker.start_task(self._redial(connection))
            task.add_done_callback(lambda _: self._trying.discard(connection))

    async def _evidence(self, connection: Connection) -> Evidence:
        return await self._liveness.evidence(self._control_of(connection))

    # --- the side that dialed --------------------------------------------------------

    async def _redial(self, connection: Connection) -> str:
        """Try to resume a connection; return why it is lost, empty if it may not be."""
        try:
            async with asyncio.timeout(self._worker.options.connect_timeout_s):
                dialled = await connect_any(
                    self._ways_to(connection),
                    lambda: self._new_bearer(connection),
                    self._worker.connectors,
                )
                hello = await dialled.handler.until_open()
        except RefusedError as error:
            runs = await self._evidence(connection) in _RUNS
            return "" if runs else f"nobody listens any more: {error}"
        except RemoteProtocolError as error:
            return str(error)
        except (TransportError, TimeoutError):
            return ""
        return "" if hello.verdict == SUPERSEDED else hello.verdict

    def _ways_to(self, connection: Connection) -> list[Address]:
        """Return where a connection can be dialed again: first where it was."""
        control = self._control_of(connection)
        name = control.peer.name if control.peer is not None else ""
        ways = self._usable(self._member_named(name))
        if connection.address is not None:
            ways = [one for one in ways if one != connection.address]
            ways.insert(0, connection.address)
        return ways

    def _new_bearer(self, target: Connection) -> Connection:
        """Make the connection that is to bring `target` another transport."""
        name = target.peer.name if target.peer is not None else ""
        loop = self._worker.loop
        begun_s = loop.time()

        def on_proved(bearer: Connection) -> None:
            if target.bearer is not None and not target.bearer.ended.done():
                bearer.fail(ConnectError("another attempt is further"))
                return
            # From here on what the old transport brings would be read twice.
            target.break_off("another transport takes the place of this one")
            target.bearer = bearer
            target.attempt += 1
            bearer.hello(
                self._worker.hello(
                    expects=name,
                    attempt=target.attempt,
                    resume=target.token,
                    received=target.received,
                )
            )
            patience_s = ANSWER_S + 3 * (loop.time() - begun_s)
            loop.call_later(patience_s, self._give_up_bearer, target, bearer)

        def on_answer(bearer: Connection, hello: Hello) -> None:
            self._on_resume_answer(target, bearer, hello)

        return self.make_connection(Role.DIALER, on_proved, on_answer)

    def _on_resume_answer(
        self, target: Connection, bearer: Connection, hello: Hello
    ) -> None:
        if not self._is_trusted(bearer):
            return
        peer = target.peer
        if hello.verdict or peer is None or peer.incarnation != hello.incarnation:
            bearer.open_to(SILENT)
            bearer.close()
            if not hello.verdict:
                target.end(ConnectionLostError("another worker has taken its place"))
        elif target.bearer is not bearer or not target.is_broken:
            bearer.fail(ConnectError(SUPERSEDED))
        else:
            target.bearer = None
            self._resume(target, bearer, hello)

    @staticmethod
    def _give_up_bearer(target: Connection, bearer: Connection) -> None:
        """Make room for another attempt: this one has got no answer to its HELLO."""
        if target.bearer is bearer:
            target.bearer = None
            bearer.fail(ConnectError("no answer to the attempt to resume"))

    def _resume(self, target: Connection, bearer: Connection, hello: Hello) -> None:
        """Let a connection go on over the transport of another."""
        transport = bearer.release_transport()
        try:
            target.adopt(transport, hello.received)
        except AsyncRpcError as error:
            transport.abort()
            target.end(error)
            return
        self._set_broken(target, broken=False)
        target.mended.set()
        self._liveness.on_resumed(target)
        self._worker.counters.connections_resumed += 1

    # --- the side that was dialed ----------------------------------------------------

    async def _ask(self, connection: Connection) -> str:
        """Return why nobody will resume a connection; empty if somebody may."""
        evidence = await self._evidence(connection)
        if evidence is Evidence.GONE:
            return "its process has ended"
        if evidence in _RUNS:
            return ""
        try:
            async with asyncio.timeout(self._worker.options.connect_timeout_s):
                dialled = await connect_any(
                    self._ways_to(connection), Discard, self._worker.connectors
                )
            dialled.transport.abort()
        except RefusedError as error:
            return f"nobody listens any more: {error}"
        except (TransportError, TimeoutError):
            return ""
        return ""

    def _on_resume_offer(self, bearer: Connection, hello: Hello) -> None:
        """A worker dials to resume a connection."""
        target = None if self._closing else self._resumable(hello)
        if target is None:
            self._refuse(bearer, NO_SUCH)
            return
        if hello.attempt <= target.attempt:
            self._refuse(bearer, SUPERSEDED)
            return
        target.break_off("the peer resumes the connection")
        bearer.hello(self._worker.hello(resume=target.token, received=target.received))
        target.attempt = hello.attempt
        self._resume(target, bearer, hello)

    def _resumable(self, hello: Hello) -> Connection | None:
        """Return the connection that a dialer means, if it is there."""
        for connection in self._connections:
            peer = connection.peer
            if (
                connection.role is Role.ACCEPTOR
                and connection.on_broken is not None
                and connection.token == hello.resume
                and peer is not None
                and peer.incarnation == hello.incarnation
            ):
                return connection
        return None
