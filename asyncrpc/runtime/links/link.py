"""A link: the calls between this worker and one incarnation of another.

It turns calls into frames (`caller`) and frames into calls (`callee`), over whichever
connection survives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

from asyncrpc.errors import MalformedError, Outcome
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls.callee import CalleeSide
from asyncrpc.runtime.calls.caller import CallerSide
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.serde import is_unprepared, unreadable
from asyncrpc.wire.frames import FrameKind

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.payloads.lanes import LaneConnection
    from asyncrpc.runtime.worker import Worker


class Link(CallerSide, CalleeSide):
    """The calls to and from one peer over one connection.

    Attributes:
        is_proven: whether the connection is known to be open at both ends.
    """

    def __init__(self, worker: Worker, peer: WorkerId, connection: Connection) -> None:
        super().__init__(worker, peer, connection)
        self.is_proven = True
        self._handlers: dict[int, Callable[..., None]] = {
            FrameKind.REQUEST: self._on_request,
            FrameKind.RESPONSE: self._on_response,
            FrameKind.ERROR: self._on_error,
            FrameKind.CANCEL: self._on_cancel,
            FrameKind.STREAM_ITEM: self._on_stream_item,
            FrameKind.STREAM_END: self._on_stream_end,
            FrameKind.STREAM_CREDIT: self._on_stream_credit,
            FrameKind.SERVICE: self._on_service,
            FrameKind.NOTICE: self._on_notice,
            FrameKind.PING: self._on_ping,
            FrameKind.PONG: self._on_pong,
            FrameKind.GOODBYE: self._on_goodbye,
            FrameKind.FREE: self._on_free,
            FrameKind.LANES: self._on_lanes,
            FrameKind.LANE_DROP: self._on_lane_drop,
            FrameKind.CREDIT: self.credit.on_credit,
            FrameKind.WANT: self.credit.on_want,
            FrameKind.ACK: self._on_ack,
            FrameKind.CLOSE: self._on_close,
        }
        connection.watch_requests(self.credit.on_begun)
        connection.stand_in(unreadable)

    def on_message(  # noqa: PLR0917  (a call per message: no object in between)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take one message."""
        handler = self._handlers.get(kind)
        if handler is None:
            raise MalformedError(f"a {FrameKind(kind).name} on an open connection")
        if buffers and is_unprepared(control):
            if kind == FrameKind.REQUEST:
                self.credit.on_arrived(call_id, buffers)
            deliver = functools.partial(handler, flags, call_id, aux, head)
            self.preparing.take(
                kind, call_id, control, buffers, head=head, deliver=deliver
            )
            return
        handler(flags, call_id, aux, head, control, buffers)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Take note that the peer gave up a message.

        A request has not begun here; an answer is given up when nobody waits for it.
        """
        is_unwanted = kind == FrameKind.RESPONSE and self.pending.get(call_id) is None
        if kind != FrameKind.REQUEST and not is_unwanted:
            raise MalformedError(f"the answer to call {call_id} was begun and given up")

    def _on_ping(self, _flags: int, call_id: int, aux: int, *_rest: object) -> None:
        self.connection.send(FrameKind.PONG, call_id, aux=aux)

    def _on_pong(self, *_rest: object) -> None:
        """Take it: that something has come is all that was wanted."""

    def _on_ack(self, _flags: int, lane: int, aux: int, *_rest: object) -> None:
        connection = self._connection_named(lane)
        if connection is not None:
            connection.on_ack(aux)

    def _on_close(
        self,
        _flags: int,
        lane: int,
        _aux: int,
        _head: bytes,
        control: bytes,
        *_rest: object,
    ) -> None:
        connection = self._connection_named(lane)
        if connection is not None:
            connection.on_peer_close(bytes(control).decode(errors="replace"))

    def _connection_named(self, lane: int) -> LaneConnection | None:
        """Return the connection, or one of its lanes; None if that has ended."""
        if not lane:
            return self.connection
        lanes = self.connection.lanes
        return None if lanes is None else lanes.connection_of(lane)

    def _on_lanes(self, _flags: int, _id: int, aux: int, *_rest: object) -> None:
        if self.connection.lanes is not None:
            self.connection.lanes.on_asked(aux)

    def _on_lane_drop(self, _flags: int, serial: int, aux: int, *_: object) -> None:
        lanes = self.connection.lanes
        dropped = lanes.arrivals.drop(serial, aux) if lanes is not None else None
        if dropped is not None:
            self.on_transfer_dropped(*dropped)

    def _on_free(self, _flags: int, location: int, *_rest: object) -> None:
        self.worker.memory.take_back_from(self.link, location)

    def _on_goodbye(self, *_rest: object) -> None:
        self.peer_drains = True

    def say_goodbye(self) -> None:
        """Tell the peer that no further request is sent or accepted."""
        self.connection.send(FrameKind.GOODBYE, 0)

    def on_lost(self, reason: str) -> None:
        """The connection has ended: fail what waits, cancel what it runs."""
        self.lost_because = reason or "the connection was closed"
        waited = self.credit.close()
        first_unsent = self.connection.first_unsent
        for call in self.pending.take_all():
            call.settle()
            call.pins = None  # the peer's death settles what it was lent
            if isinstance(call, CallFuture):
                outcome = call.outcome_if_lost
                if call.call_id in waited or call.call_id >= first_unsent:
                    # It never left this worker.
                    outcome = Outcome.NOT_EXECUTED
                call.fail(self._lost_error(call.function, outcome))
            else:
                call.on_error(self._lost_error(call.function, Outcome.UNKNOWN), 0)
        for inbound in self.served:
            inbound.cancel()


class FirstMessage:
    """The sink of a connection until the first message, which it tells of."""

    def __init__(self, link: Link, on_first: Callable[[], None]) -> None:
        self._link = link
        self._on_first = on_first

    def on_message(  # noqa: PLR0917  (as of every sink)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take it; all further ones go to the link."""
        self._tell().on_message(kind, flags, call_id, aux, head, control, buffers)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Take that as the first message."""
        self._tell().on_transfer_dropped(kind, call_id)

    def _tell(self) -> Link:
        self._link.connection.open_to(self._link)
        self._on_first()
        return self._link
