"""Lanes: further connections to a peer, which carry only large payloads.

A small message must never wait behind a large one: so payloads do not go over the
control connection (`connection`) and its kernel queues, but over lanes.  The first
payload that needs lanes opens them.  The side that dialed the control connection dials
them; the other side asks for them.  Both directions use them.

`pump` sends over lanes.  This module opens, reads and closes lanes.  It limits how much
one turn of the loop reads from all lanes of a link, because copying a chunk blocks the
loop.

`PayloadRoutes` decides by which way a large message leaves: through shared memory, or
in chunks.

A lane that breaks is resumed.  If it cannot be resumed, its bytes in flight are lost,
and the link ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Final

from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.options import LANES_MAX
from asyncrpc.core.payloads.machine.lanes import (
    TRANSITIONS,
    LanesEvent,
    LanesState,
    TurnRation,
)
from asyncrpc.core.payloads.ports import MemoryIsReady, PayloadConnection, PayloadRoute
from asyncrpc.core.payloads.pump import ChunkPump
from asyncrpc.core.transport.flow import LINGER_S, WaterMarks
from asyncrpc.core.wire.chunks import Arrivals, LaneReader
from asyncrpc.core.wire.frames import HEADER_BYTES, INLINE_BYTES_MAX, FrameKind
from asyncrpc.core.wire.outgoing import OutgoingEvent, OutgoingMessage, OutgoingMessages
from asyncrpc.errors import (
    AsyncRpcError,
    ConnectError,
    ConnectionLostError,
    MalformedError,
    RemoteProtocolError,
    TransportError,
)

logger = logging.getLogger("asyncrpc")

# Lanes of a link if `NetworkOptions.bulk_lanes` does not say; see
# docs/adr/0008-bulk-lanes.md.
LANES_BY_SCHEME: Final = {"tcp": 2, "uds": 1, "mem": 1}
LANES_ON_HOST: Final = 1  # a second TCP connection on loopback only costs
# How long a payload waits for the first lane.  Then it takes the control connection.
OPENING_WAIT_S: Final = 1.0
# A lane that has not taken the last chunk gets no other chunk, which would only wait.
_MARKS: Final = WaterMarks(high_bytes=0, low_bytes=0)
# Payloads wait for the first lane.
_HOLDING: Final = frozenset({LanesState.NONE, LanesState.OPENING})


class Lane:
    """One lane; it replaces the frame reader of its connection.

    Attributes:
        connection: the connection of the lane.
        stream: the stream of the connection.
        rest: the unwritten rest of the present chunk.
        reader: reads chunks into their place.
        is_held: whether the other end is known to hold the lane as well.
        is_closing: whether this end has closed it.
        broken_by: the error of a transport that broke before `is_held`.
        get_buffer: the reader's method.
        bytes_copied: always 0.
        message_bytes_copied: always 0.
    """

    bytes_copied = 0
    message_bytes_copied = 0

    def __init__(self, lanes: Lanes, connection: PayloadConnection) -> None:
        self.connection = connection
        self.stream = connection.stream
        self.rest: deque[bytes | memoryview] = deque()
        self.reader = LaneReader(lanes.arrivals)
        self.get_buffer = self.reader.get_buffer
        self.is_held = False
        self.is_closing = False
        self.broken_by: TransportError | None = None
        self._lanes = lanes

    def write(self, limit_bytes: int) -> int:
        """Write the next bytes of the chunk; return how many.

        A rest that is no longer than a header is written, too: else a chunk as long as
        the limit would take two writes, and two reads at the other end.
        """
        parts: list[bytes | memoryview] = []
        written = 0
        while self.rest and written < limit_bytes:
            part = self.rest.popleft()
            if len(part) > limit_bytes + HEADER_BYTES - written:
                view = memoryview(part)
                self.rest.appendleft(view[limit_bytes - written :])
                part = view[: limit_bytes - written]
            parts.append(part)
            written += len(part)
        self.stream.write_now(*parts)
        return written

    def advance(self, nbytes: int) -> None:
        """Take bytes that have landed."""
        if not self.is_held:
            self._lanes.on_held(self)
        self.reader.advance(nbytes)
        if self.reader.is_waiting:
            self.stream.pause_reading()
        self._lanes.on_read(nbytes)


class Lanes:
    """The lanes of one link, and the messages that wait for the first.

    Attributes:
        state: whether payloads can leave over lanes.
        arrivals: the payloads that arrive.
        lanes: the lanes that are open at both ends.
        accepted: by token, the lanes that the dialer is not known to hold; they are not
            sent over.  If such a lane breaks, it waits for the dialer.
    """

    def __init__(
        self,
        control: PayloadConnection,
        arrivals: Arrivals,
        *,
        loop: asyncio.AbstractEventLoop,
        wanted: int | None,
        is_on_host: bool,
        dial: Callable[[int], Coroutine[Any, Any, None]] | None,
        redial: Callable[[Any, int], None],
        start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        is_ready: MemoryIsReady | None = None,
    ) -> None:
        """Prepare the lanes of a link, without opening one.

        Args:
            wanted: number of lanes; None: the number that suits the transport.
            dial: opens a number of lanes; None at the side that was dialed.
            redial: dials a lane again that has broken at the peer; its second argument
                is the last attempt that the peer accepted.
            is_ready: whether memory may be written to now; None: all memory may.
        """
        if wanted is None:
            wanted = LANES_BY_SCHEME.get(control.scheme, 0)
            wanted = min(wanted, LANES_ON_HOST) if is_on_host else wanted
        self.arrivals = arrivals
        self.arrivals.on_opened = self._proceed
        if is_ready is not None:
            self.arrivals.is_ready = lambda memory: is_ready(memory, self._proceed)
        self.arrivals.on_complete = self.acknowledge
        self.lanes: list[Lane] = []
        self.accepted: dict[int, Lane] = {}
        self.state = LanesState.NONE if wanted else LanesState.OFF
        self._control = control
        self._loop = loop
        self._wanted = wanted
        self._dial = dial
        self._redial = redial
        self._start_task = start_task
        self._pump = control.pump
        self._outgoing = control.outgoing
        self._waiting: list[OutgoingMessage] = []  # for the first lane
        self._opening: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._turn_bytes = 0
        self._ration = TurnRation()
        self._is_paused = False
        self._pump.lanes = self.lanes
        self._pump.ration = lambda: self._ration.next_turn(control.reads)

    def _on(self, event: LanesEvent) -> bool:
        """Take an event; return whether the state has changed."""
        before = self.state
        self.state = TRANSITIONS.after(before, event)
        return self.state is not before

    # --- sending ---------------------------------------------------------------------

    def send(self, message: OutgoingMessage) -> bool:
        """Keep a message while the first lane is being opened; see `PayloadRoute`."""
        if self.state not in _HOLDING:
            return False
        take_back = partial(self._waiting.remove, message)
        self._outgoing.wait(message, OutgoingEvent.AWAIT_LANE, take_back)
        self._waiting.append(message)
        if self.state is LanesState.NONE:
            self._open(self._wanted)
        return True

    def count_kept(self) -> int:
        """Return how many bytes the peer has not acknowledged."""
        return sum(lane.connection.count_kept() for lane in self._all)

    @property
    def _all(self) -> tuple[Lane, ...]:
        return (*self.lanes, *self.accepted.values())

    # --- receiving -------------------------------------------------------------------

    def on_read(self, nbytes: int) -> None:
        """Count bytes read in this turn of the loop; pause reading at the limit."""
        self._turn_bytes += nbytes
        if self._turn_bytes >= self._ration.limit_bytes and not self._is_paused:
            self._is_paused = True
            for lane in self.lanes:
                lane.stream.pause_reading()
            self._loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_bytes = 0
        self._is_paused = False
        limit_bytes = self._ration.next_turn(self._control.reads)
        for lane in self.lanes:
            lane.reader.limit_reads(limit_bytes)
            if not lane.reader.is_waiting:
                lane.stream.resume_reading()

    def _proceed(self) -> None:
        """Resume lanes that wait for a message or memory which may be there now."""
        for lane in self.lanes:
            if lane.reader.is_waiting and lane.reader.proceed() and not self._is_paused:
                lane.stream.resume_reading()

    # --- opening ---------------------------------------------------------------------

    def _open(self, count: int) -> None:
        self._on(LanesEvent.WANT)
        self._timer = self._loop.call_later(OPENING_WAIT_S, self._on_late)
        if self._dial is not None:
            self._opening = self._start_task(self._open_all(self._dial, count))
        else:
            self._control.send(FrameKind.LANES, 0, aux=count)

    async def _open_all(
        self, dial: Callable[[int], Coroutine[Any, Any, None]], count: int
    ) -> None:
        try:
            await dial(min(count, LANES_MAX))
        except (AsyncRpcError, TimeoutError) as error:
            if self._on(LanesEvent.FAILED):
                logger.warning("no lane to %s: %s", self._control.where, error)
                self._control.send(FrameKind.LANES, 0, aux=0)
                self._stop_waiting()

    def on_asked(self, count: int) -> None:
        """Handle LANES: the peer asks for lanes, or answers that it opens no lanes."""
        if self._dial is None:
            if count:
                raise MalformedError(
                    f"LANES from the side that dials must be 0, not {count}"
                )
            if self._on(LanesEvent.FAILED):
                self._stop_waiting()
        elif count <= 0:
            raise MalformedError(f"LANES must ask for at least 1 lane, not {count}")
        elif self.state is LanesState.OFF:
            self._control.send(FrameKind.LANES, 0, aux=0)
        elif self.state is LanesState.NONE:
            self._open(max(count, self._wanted))

    def attach(self, connection: PayloadConnection) -> None:
        """Take a connection as a lane, after both HELLOs."""
        if self.state is LanesState.CLOSED:
            connection.fail(ConnectError("the link of the lane has ended"))
            return
        lane = Lane(self, connection)
        on_lost = connection.on_lost

        def lost(_: object, error: AsyncRpcError | None) -> None:
            if on_lost is not None:
                on_lost(connection, error)
            self._on_lane_lost(lane, error)

        connection.on_lost = lost
        self.accepted[connection.token] = lane
        connection.open_as_lane(
            lane, self._control, on_writable=self._pump.pump, marks=_MARKS
        )
        if self._control.on_broken is not None:
            connection.allow_resuming(partial(self._on_broken, lane))
        if self._dial is not None:
            # Tells the peer that the lane is open, before any message that may use it.
            self._control.send(FrameKind.ACK, connection.token)
            self.on_held(lane)

    def on_held(self, lane: Lane) -> None:
        """Use a lane, as both ends are known to hold it."""
        lane.is_held = True
        del self.accepted[lane.connection.token]
        self.lanes.append(lane)
        self._on(LanesEvent.OPENED)
        self._stop_waiting()
        self._pump.pump()
        if lane.connection.is_broken:
            self._on_broken(lane, lane.connection, lane.broken_by)

    def _on_broken(
        self, lane: Lane, connection: PayloadConnection, error: TransportError | None
    ) -> None:
        """Resume a lane whose transport has broken, if both ends hold the lane."""
        if not lane.is_held:
            lane.broken_by = error
        elif self._control.on_broken is not None:
            self._control.on_broken(connection, error)

    def _on_late(self) -> None:
        self._on(LanesEvent.WAITED)
        self._stop_waiting()

    def _stop_waiting(self) -> None:
        """Send the waiting messages: a lane is open, or will not open soon."""
        self._stop_timer()
        while self._waiting:
            self._pump.send(self._waiting.pop(0))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- the end ---------------------------------------------------------------------

    def _on_lane_lost(self, lane: Lane, error: AsyncRpcError | None) -> None:
        if not lane.is_held:
            del self.accepted[lane.connection.token]
            return
        self.lanes.remove(lane)
        if self.state is LanesState.CLOSED:
            return
        if not self.lanes:
            self._on(LanesEvent.LOST)
            self._pump.drop_all()
        in_order = error is None or lane.connection.peer_closed is not None
        if in_order and lane.reader.is_between_chunks:
            # The peer closes in order, and the control connection last of all.
            if self._timer is None:
                self._timer = self._loop.call_later(LINGER_S, self._on_left_alone)
        elif isinstance(error, RemoteProtocolError):
            self._control.fail(error)
        else:
            why = str(error) if error is not None else "it ended inside a payload"
            where = lane.connection.where
            self._control.fail(ConnectionLostError(f"a lane to {where} broke: {why}"))

    def _on_left_alone(self) -> None:
        why = f"{self._control.where} closed its lanes, but not the connection"
        self._control.fail(ConnectionLostError(why))

    def connection_of(self, token: int) -> PayloadConnection | None:
        """Return a lane's connection by its token; None if it has ended."""
        lane = self._lane_of(token)
        return None if lane is None else lane.connection

    def _lane_of(self, token: int) -> Lane | None:
        lanes = (lane for lane in self._all if lane.connection.token == token)
        return next(lanes, None)

    def on_ack(self, token: int, received: int) -> None:
        """Handle an ACK of a lane; it shows that the peer holds the lane."""
        self._ration.on_ack(self._control.reads)
        if (lane := self.accepted.get(token)) is not None:
            self.on_held(lane)
        if (connection := self.connection_of(token)) is not None:
            connection.on_ack(received)

    def on_peer_broken(self, token: int, attempt: int) -> None:
        """Handle LANE_BROKEN: a lane, which may look whole here, broke at the peer."""
        if self._dial is None:
            raise MalformedError("LANE_BROKEN must not come from the side that dials")
        lane = self._lane_of(token)
        # The end of a lane may overtake its CLOSE, which goes another way: then it
        # looks broken to the peer, until the CLOSE comes.
        if lane is not None and not lane.is_closing:
            self._redial(lane.connection, attempt)

    def acknowledge(self) -> None:
        """Acknowledge all lanes, so that the peer lets go of a payload."""
        for lane in self.lanes:
            lane.connection.acknowledge()

    async def close(self) -> None:
        """Send all queued chunks, then end every lane in order."""
        if self.lanes:
            await self._pump.drained()  # the caller has a limit; `clear` completes it
        ended = [lane.connection.ended for lane in self._all]
        for lane in self._all:
            lane.is_closing = True
            lane.connection.close()
        if ended:
            await asyncio.wait(ended)  # within the same limit

    def clear(self) -> None:
        """End all lanes, as the control connection has ended."""
        self._on(LanesEvent.CLOSE)
        self._stop_timer()
        if self._opening is not None:
            self._opening.cancel()
        self._waiting.clear()
        for lane in self._all:
            lane.connection.fail(ConnectionLostError("the link of the lane has ended"))


class PayloadRoutes:
    """The ways of one connection.

    Attributes:
        mover: moves payloads through shared memory; None if no memory is shared.
        lanes: hold payloads that the mover refuses while the first lane is opened.
        pump: sends the rest, over lanes or over the connection itself.
    """

    def __init__(
        self, pump: ChunkPump, outgoing: OutgoingMessages, send: Callable[..., None]
    ) -> None:
        self.mover: PayloadRoute | None = None
        self.lanes: Lanes | None = None
        self.pump = pump
        self._outgoing = outgoing
        self._send = send
        self._is_closed = False

    def submit(self, message: OutgoingMessage) -> None:
        """Send a message, or let it wait; this method never waits.

        On a closed connection the message is dropped.
        """
        buffers = message.buffers
        if self._is_closed:
            self._outgoing.forget(message)
        elif isinstance(buffers, PendingBuffers) and not buffers.are_ready:
            # It waits until the peer has the regions; other messages overtake it.
            self._outgoing.wait(message, OutgoingEvent.BLOCK, buffers.forget)
            buffers.then(message, self.submit)
        elif sum(buffer.nbytes for buffer in buffers) > INLINE_BYTES_MAX:
            self._send_payload(message)
        else:
            self._send(
                message.kind,
                message.call_id,
                flags=message.flags,
                aux=message.aux,
                head=message.head,
                control=message.control,
                buffers=list(buffers),
                on_sent=partial(self._outgoing.sent, message),
            )

    def _send_payload(self, message: OutgoingMessage) -> None:
        """Send a message by the first way that takes it."""
        for way in (self.mover, self.lanes):
            if way is not None and way.send(message):
                return
        self.pump.send(message)

    def clear(self) -> None:
        """Drop all unsent messages, as the connection has ended."""
        self._is_closed = True
        for way in (self.mover, self.lanes, self.pump):
            if way is not None:
                way.clear()
        self._outgoing.clear()
