"""The liveness sidecar: lets peers see whether this worker runs, even if it is busy.

Peers on this host see it from the kernel and from our *heartbeat record*, which the
event loop writes twice a second; peers on other hosts ask at its port.  There the
worker itself answers, or else the *sidecar process*, which lives on when this one
stands still or has died (`core.sidecar`).  `Hello.sidecar` says where both are:

    pulse://PID/STARTED/NAMESPACE/DESCRIPTOR    see `asyncrpc.core.sidecar.pulse`
    tcp://HOST:PORT                             see `asyncrpc.core.sidecar.query`

What a peer concludes from them is in `evidence`.

Only Linux provides all this.  Elsewhere, and in a simulation, there is no evidence.

A worker whose loop runs answers queries to its sidecar itself.

Peers ask at its port, as they dial it.  If its loop does not run, it does not accept,
and the sidecar process answers: see `asyncrpc.core.sidecar.process`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any, Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.heartbeat import (
    HeartbeatRecord,
    find_here,
    is_supported,
)
from asyncrpc.core.links.sidecar_process import SidecarProcess, SidecarResources
from asyncrpc.core.links.sidecar_process import (
    is_supported as process_is_supported,
)
from asyncrpc.core.members import Member
from asyncrpc.core.options import Options
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.sidecar import pulse, query
from asyncrpc.core.transport.abc import StreamHandler, Transport
from asyncrpc.core.transport.handover import Handover, port_name
from asyncrpc.core.transport.tcp import TcpListener
from asyncrpc.core.wire.frames import Hello
from asyncrpc.errors import TransportError

# Without a query, or not closed by the client.  The oldest goes: a client sends its
# query at once, and needs a connection for one round trip.
CONNECTIONS_MAX: Final = 64
CONNECTION_S: Final = 2.0  # a client sends its query at once


class SidecarAnswers:
    """Answers queries for one worker."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, incarnation: int, secret: bytes | None
    ) -> None:
        """Prepare.

        Args:
            incarnation: of the worker; queries for others are not answered.
        """
        self._loop = loop
        self.incarnation = incarnation
        self.key = query.key_from(secret, incarnation)
        self._open: dict[Inquiry, asyncio.TimerHandle] = {}

    def make(self) -> Inquiry:
        """Return the handler of one connection."""
        return Inquiry(self)

    def begin(self, inquiry: Inquiry, transport: Transport) -> None:
        """Limit the time of a connection; without room for it, end the oldest."""
        if len(self._open) >= CONNECTIONS_MAX:
            oldest = next(iter(self._open))
            self.end(oldest)
            oldest.abort()
        timer = self._loop.call_later(CONNECTION_S, transport.abort)
        self._open[inquiry] = timer

    def end(self, inquiry: Inquiry) -> None:
        """Make room: a connection has ended."""
        timer = self._open.pop(inquiry, None)
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Stop the timers."""
        for inquiry in tuple(self._open):
            self.end(inquiry)
            inquiry.abort()


class Inquiry:
    """A connection of a peer that asks about this worker."""

    def __init__(self, answers: SidecarAnswers) -> None:
        self._answers = answers
        self._record = bytearray(query.QUERY_BYTES)
        self._read = 0
        self._transport: Transport | None = None

    def connection_made(self, transport: Transport) -> None:
        """Begin."""
        self._transport = transport
        self._answers.begin(self, transport)

    def get_buffer(self, _sizehint: int, /) -> memoryview:
        """Return the place of missing bytes; of surplus bytes, any place."""
        view = memoryview(self._record)
        return view[self._read :] if self._read < len(view) else view

    def buffer_updated(self, nbytes: int, /) -> None:
        """Answer a query once it is whole; end on anything else.

        The client closes the connection, so that no port stays in TIME_WAIT here.
        """
        self._read += nbytes
        if self._read < query.QUERY_BYTES or self._transport is None:
            return
        answers, record = self._answers, bytes(self._record)
        nonce = query.read_query(answers.key, answers.incarnation, record)
        if nonce is None or self._read > query.QUERY_BYTES:
            self._transport.abort()
            return
        key, incarnation = answers.key, answers.incarnation
        answer = query.pack_answer(key, incarnation, nonce, pulse.TICKING)
        self._transport.send((answer,))

    def abort(self) -> None:
        """End now."""
        if self._transport is not None:
            self._transport.abort()

    def connection_lost(self, _error: TransportError | None, /) -> None:
        """Make room for another."""
        self._answers.end(self)

    def pause_writing(self) -> None:
        """Do nothing: an answer is 56 bytes."""

    def resume_writing(self) -> None:
        """Do nothing."""


logger = logging.getLogger("asyncrpc")


@dataclass(frozen=True, slots=True)
class Listening:
    """Where a worker can be asked.

    Attributes:
        addresses: of TCP, as it publishes them.
        adopt: makes a connection of a socket that the process has accepted.
    """

    addresses: tuple[str, ...]
    listeners: tuple[TcpListener, ...]
    adopt: Callable[[Any], Coroutine[Any, Any, None]]


class Sidecar:
    """Lets peers see that one worker runs: its record, and its sidecar process.

    Attributes:
        addresses: for `Hello.sidecar`.
        process: the sidecar process; None where there is none.
        doors: what the worker's listening sockets must lead to; see `transport.doors`.
    """

    def __init__(self, identity: WorkerIdentity, options: Options) -> None:
        self._identity = identity
        self._options = options
        self._record: HeartbeatRecord | None = None
        self._answers: SidecarAnswers | None = None
        self.process: SidecarProcess | None = None
        self.addresses: tuple[str, ...] = ()
        self.doors: dict[bytes, Callable[[], StreamHandler]] = {}

    def start(self, listening: Listening, scheduler: Scheduler) -> None:
        """Let a worker that runs in real time be seen.

        Where that is impossible there is nothing to see, and no error.
        """
        options, incarnation = self._options, self._identity.incarnation
        loop, secret = scheduler.loop, options.secret_bytes
        if not is_supported:
            return
        try:
            self._record = HeartbeatRecord(incarnation, loop)
        except OSError as error:
            logger.debug("worker %r: no pulse: %s", self._identity.name, error)
            return
        self.addresses = (str(self._record.address),)
        is_off = options.liveness.sidecar == "off" or not process_is_supported
        if is_off or not listening.listeners:
            return
        self._answers = SidecarAnswers(loop, incarnation, secret)
        self.doors[query.ASKED] = self._answers.make
        self.addresses += listening.addresses
        ports = tuple(
            (port_name(port), descriptor)
            for listener in listening.listeners
            for port, descriptor in listener.descriptors
        )
        try:
            handover = Handover(loop, listening.adopt, scheduler.start_task)
        except OSError as error:
            logger.warning(
                "worker %r has no sidecar process: %s",
                self._identity.name,
                shortage_of(error) or error,
            )
            return
        resources = SidecarResources(self._record.descriptor, ports, handover)
        self.process = SidecarProcess(self._identity, loop, secret, resources)
        if options.liveness.sidecar == "on":
            self.process.start()

    @property
    def ticked_ns(self) -> int | None:
        """When the event loop last ran; None if there is no record.

        Thread safety: from any thread.
        """
        return None if self._record is None else self._record.ticked_ns

    def on_peer(self, hello: Hello) -> None:
        """Make the process answer if this peer cannot see for itself."""
        if self.process is not None and find_here(hello) is None:
            self.process.start()

    def on_members(self, members: Iterable[Member]) -> None:
        """Make the process answer members elsewhere that have not met this worker.

        It may become busy before they do, and then could not start the process.
        """
        if self.process is not None and any(
            member.host_id not in ("", HOST_ID) for member in members
        ):
            self.process.start()

    def release(self) -> None:
        """End the process, which also has the listening sockets; it takes 1 ms."""
        if self.process is not None:
            self.process.close()

    def close(self) -> None:
        """End the process, the answers and the record."""
        self.release()
        if self._answers is not None:
            self._answers.close()
        if self._record is not None:
            self._record.close()
            self._record = None
