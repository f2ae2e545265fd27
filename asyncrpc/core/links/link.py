"""A link: what goes between this worker and one incarnation of another.

It is a router: messages that come over its connection go to the part that takes them,
and what this worker asks of the peer goes to the part that sends it.  Each part is
made here, holds no more than it needs, and can be used without a link.

    part           what it does                               made in
    calls          calls and messages to the peer             `calls.outbound`
    answers        what the peer answers                      `calls.outbound`
    requests       what the peer asks                         `calls.requests`
    responder      what this worker answers                   `calls.inbound`
    messages       values in messages                         `calls.message_codec`
    preparation    messages that are not ready to be read     `calls.preparation`
    long_messages  messages that take long to be read         `calls.long_messages`
    credit         large requests, in both directions         `calls.credit`
    deferred       messages that are not ready to be sent     `calls.deferred`
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Final, TypeAlias

from asyncrpc.core.calls.credit import LinkCredit
from asyncrpc.core.calls.deferred import DeferredMessages
from asyncrpc.core.calls.heads import ReceivedHeads
from asyncrpc.core.calls.inbound import InboundCall, Responder
from asyncrpc.core.calls.long_messages import LongMessages
from asyncrpc.core.calls.machine.calls import (
    LinkState,
    LinkStatus,
    PendingCalls,
    ServedCalls,
)
from asyncrpc.core.calls.message_codec import (
    NO_META,
    SMALL_BYTES_MAX,
    DecodedBuffers,
    MessageCodec,
    meta_of,
    takes_long,
)
from asyncrpc.core.calls.outbound import (
    AnswerReceiver,
    CallEnds,
    OutboundCalls,
)
from asyncrpc.core.calls.peer_memory import VALUE_BYTES, Backlog
from asyncrpc.core.calls.ports import CallHost
from asyncrpc.core.calls.preparation import MessagePreparation
from asyncrpc.core.calls.reading_turns import logged
from asyncrpc.core.calls.requests import RequestDispatcher
from asyncrpc.core.calls.streams import OutboundCall
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.members import member_of
from asyncrpc.core.payloads.ports import PayloadConnection
from asyncrpc.core.payloads.sharing import Sharing
from asyncrpc.core.serde import is_unprepared, unreadable
from asyncrpc.core.wire.frames import Flags, Frame, FrameKind, prefix
from asyncrpc.errors import AsyncRpcError, MalformedError, OverloadedError

_LARGE: Final = int(Flags.DEFERRED | Flags.PLACED)  # of messages with large buffers

# Takes a message with a value: flags, call, aux, head, control part, buffers.
MessageHandler: TypeAlias = Callable[
    [int, int, int, bytes, bytes, list[memoryview]], None
]


class Link:
    """The calls to and from one peer over one connection.

    Attributes:
        peer: who is at the other end.
        connection: carries the messages.
        pending: our calls that have not been answered.
        served: the peer's calls that have not been answered.
        status: whether calls go both ways, one way, or no more.
        is_guest: whether a token has let the peer in.
        stream, writable: of the connection.
        is_proven: whether the connection is known to be open at both ends.
        memory: what the peer makes this worker hold without credit.
        credit: large requests, in both directions.
        ends: notes how our calls end.
        calls: calls and messages to the peer.
        check_room: see `PeerMemory.check`.
        start, start_common, start_stream, ask, tell: see `OutboundCalls`.
        send_credit, cancel: see `OutboundCalls`.
        defer: see `DeferredMessages`.
    """

    def __init__(
        self, worker: CallHost, shared: Sharing, peer: WorkerId, connection: Connection
    ) -> None:
        self.host, self.peer, self.connection = worker, peer, connection
        self._shared = shared
        hello = connection.peer
        self.is_guest = hello is not None and bool(member_of(hello).gateway)
        self.stream, self.writable = connection.stream, connection.writable
        self.is_proven = True
        self.status = LinkStatus()
        self.pending: PendingCalls[OutboundCall] = PendingCalls()
        self.served: ServedCalls[InboundCall] = ServedCalls()
        self.heads = ReceivedHeads(worker.target)
        self.memory = worker.admission.open(peer.incarnation, self.served.running)
        self.credit = LinkCredit(
            peer.name,
            worker.inbound_credit,
            self.memory,
            loop=worker.loop,
            connection=connection,
            status=self.status,
        )
        self.ends = CallEnds(peer, worker.recorder)
        self.deferred = DeferredMessages(
            to=peer.name,
            connection=connection,
            pending=self.pending,
            served=self.served,
            errors=worker.error_encoder,
            ends=self.ends,
        )
        self.defer = self.deferred.defer
        self.messages = MessageCodec(
            self,
            worker,
            connection=connection,
            dead_places=shared.leases.dead,
            give_back_places=shared.leases.give_back,
            refer=functools.partial(shared.regions.refer, self),
            devices=worker.devices,
            deferred=self.deferred,
            pickles=connection.peer is None or not connection.peer.strict,
        )
        self._join_messages()
        self._join_calls()
        self._join_requests()
        self._handlers = self._message_routes()
        self._frame_handlers = self._frame_routes()
        connection.incoming.stand_in(unreadable)

    def _join_messages(self) -> None:
        """Make the parts for messages that are not read at once."""
        self.preparation = MessagePreparation(
            self.host,
            limit=self.host.options.limits.inbound_calls_max,
            connection=self.connection,
            pending=self.pending,
            status=self.status,
            unread=self.messages,
            read_head=self.heads.read,
            expand=self.credit.expand,
        )
        self.long_messages = LongMessages(
            self.host,
            messages=self.messages,
            connection=self.connection,
            status=self.status,
        )
        self.messages.discard_apart = functools.partial(
            self.long_messages.take, NO_META, buffers=[], deliver=None
        )

    def _join_calls(self) -> None:
        """Make the parts for what this worker asks of the peer."""
        self.calls = OutboundCalls(
            self,
            self.peer,
            self.host,
            connection=self.connection,
            pending=self.pending,
            status=self.status,
            credit=self.credit,
            messages=self.messages,
            ends=self.ends,
        )
        # As attributes: a call takes one step less to its part.
        self.check_room = self.memory.check
        self.start = self.calls.start
        self.start_common = self.calls.start_common
        self.start_stream = self.calls.start_stream
        self.ask, self.tell = self.calls.ask, self.calls.tell
        self.send_credit = self.calls.send_credit
        self.cancel = self.calls.cancel
        self.answers = AnswerReceiver(
            self.peer,
            self.host,
            connection=self.connection,
            pending=self.pending,
            messages=self.messages,
            calls=self.calls,
            ends=self.ends,
        )

    def _join_requests(self) -> None:
        """Make the parts for what the peer asks of this worker."""
        self.responder = Responder(
            self,
            self.host,
            connection=self.connection,
            backlog=Backlog(self, self.host.outbound_budget, self.memory),
            served=self.served,
            messages=self.messages,
        )
        self.requests = RequestDispatcher(
            self,
            self.host,
            connection=self.connection,
            served=self.served,
            credit=self.credit,
            messages=self.messages,
            heads=self.heads,
            preparation=self.preparation,
            responder=self.responder,
        )
        self.connection.incoming.watch_requests(self.credit.on_begun, self._is_wanted)

    def _message_routes(self) -> dict[int, MessageHandler]:
        """Return what takes each kind of message that has a value."""
        return {
            FrameKind.REQUEST: self.requests.on_request,
            FrameKind.RESPONSE: self.answers.on_response,
            FrameKind.ERROR: self.answers.on_error,
            FrameKind.STREAM_ITEM: self.answers.on_stream_item,
            FrameKind.SERVICE: self.requests.on_service,
            FrameKind.NOTICE: self.requests.on_notice,
        }

    def _frame_routes(self) -> dict[int, Callable[[Frame], None]]:
        """Return what takes each kind of frame that is all numbers, or a text."""
        return {
            FrameKind.CANCEL: self.requests.on_cancel,
            FrameKind.STREAM_END: self.answers.on_stream_end,
            FrameKind.STREAM_CREDIT: self.requests.on_stream_credit,
            FrameKind.PING: self._on_ping,
            FrameKind.PONG: self._on_pong,
            FrameKind.GOODBYE: self._on_goodbye,
            FrameKind.FREE: self._on_free,
            FrameKind.LANES: self._on_lanes,
            FrameKind.LANE_BROKEN: self._on_lane_broken,
            FrameKind.CREDIT: self.credit.on_credit,
            FrameKind.WANT: self.credit.on_want,
            FrameKind.ACK: self._on_ack,
            FrameKind.CLOSE: self._on_close,
        }

    @property
    def is_lost(self) -> bool:
        """Return whether the connection has ended."""
        return self.status.is_lost

    @property
    def is_draining(self) -> bool:
        """Return whether the peer has said that it takes no further calls."""
        return self.status.state is LinkState.DRAINING

    @property
    def lost_because(self) -> str:
        """Why the connection has ended; empty unless it has."""
        return self.status.lost_because

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
            self._on_frame(Frame(kind, flags, call_id, aux, head, control))
            return
        if buffers and is_unprepared(control):
            if kind == FrameKind.REQUEST:
                self.credit.on_arrived(call_id, control, buffers)
            deliver = functools.partial(self._read, kind, flags, call_id, aux, head)
            self.preparation.take(
                kind, call_id, control, buffers, head=head, deliver=deliver
            )
        elif (
            len(control) > SMALL_BYTES_MAX or (buffers and flags & _LARGE)
        ) and takes_long(control, buffers):
            if kind == FrameKind.REQUEST:
                self.credit.on_arrived(call_id, control, buffers)
            self._read(kind, flags, call_id, aux, head, control, buffers)
        else:
            handler(flags, call_id, aux, head, control, buffers)

    def _read(  # noqa: PLR0917
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Hand on a message, once it has been decoded if that takes long."""
        handler = self._handlers[kind]
        if not takes_long(control, buffers):
            handler(flags, call_id, aux, head, control, buffers)
            return
        if kind == FrameKind.REQUEST:
            refused = self._refused(control, buffers)
            if refused is not None:
                handler(flags, call_id, aux, head, control, refused)
                return
        self.long_messages.take(
            meta_of(kind, head),
            control,
            buffers,
            functools.partial(handler, flags, call_id, aux, head),
            takes_references=kind != FrameKind.ERROR,
        )

    def _refused(
        self, control: bytes, buffers: list[memoryview]
    ) -> DecodedBuffers | None:
        """Return what stands for a long request that there may be no room for."""
        values_max = min(len(control), self.host.options.limits.message.elements_max)
        try:
            self.memory.check(VALUE_BYTES * values_max)
        except OverloadedError as error:
            self.messages.give_back(control)
            return DecodedBuffers(buffers, loans=[], error=error)
        return None

    def _on_frame(self, frame: Frame) -> None:
        handler = self._frame_handlers.get(frame.kind)
        if handler is None:
            name = FrameKind(frame.kind).name
            raise MalformedError(f"a {name} came on an open connection")
        handler(frame)

    def _is_wanted(self, kind: int, call_id: int, head: bytes, nbytes: int) -> bool:
        """Return whether an arriving payload is wanted, but of a request."""
        if kind in (FrameKind.SERVICE, FrameKind.NOTICE):
            self.requests.check_payload(kind, head, nbytes)
            return True
        return self.answers.is_wanted(kind, call_id, nbytes)

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        """Take note that the peer gave up a message.

        A request has not begun here; an answer is given up when its caller has gone.
        """
        is_unwanted = kind == FrameKind.RESPONSE and self.pending.get(call_id) is None
        if kind != FrameKind.REQUEST and not is_unwanted:
            raise MalformedError(f"the answer to call {call_id} was begun and given up")

    def _on_ping(self, frame: Frame) -> None:
        if not self.connection.stream.room.is_set():
            return  # it reads nothing: more would only wait
        pong = prefix(FrameKind.PONG, frame.call_id, aux=frame.aux)
        self.connection.stream.write_apart(pong)

    def _on_pong(self, _: Frame) -> None:
        """Do nothing: its arrival is what counts."""

    def _on_ack(self, frame: Frame) -> None:
        lane = frame.call_id
        if not lane:
            self.connection.on_ack(frame.aux)
        elif self.connection.lanes is not None:
            self.connection.lanes.on_ack(lane, frame.aux)
        self.stream.on_taken()

    def count_written(self) -> int:
        """Return how many bytes are kept of what was written; lanes do not count."""
        return self.connection.count_kept()

    def count_kept(self) -> int:
        """Return how many bytes the peer has not taken; also answers that wait."""
        lanes = self.connection.lanes
        kept = self.connection.count_kept() + self.connection.outgoing.answer_bytes
        return kept if lanes is None else kept + lanes.count_kept()

    def _on_close(self, frame: Frame) -> None:
        connection = self._connection_named(frame.call_id)
        if connection is not None:
            connection.on_peer_close(frame.control.decode(errors="replace"))

    def _connection_named(self, lane: int) -> PayloadConnection | None:
        """Return the connection, or one of its lanes; None if that has ended."""
        if not lane:
            return self.connection
        lanes = self.connection.lanes
        return None if lanes is None else lanes.connection_of(lane)

    def give_up(self, error: AsyncRpcError) -> None:
        """End the connection because of what the peer did."""
        self.connection.fail(logged(error, self.connection.where))

    def _on_lanes(self, frame: Frame) -> None:
        if self.connection.lanes is not None:
            self.connection.lanes.on_asked(frame.aux)

    def _on_lane_broken(self, frame: Frame) -> None:
        if self.connection.lanes is not None:
            self.connection.lanes.on_peer_broken(frame.call_id, frame.aux)

    def _on_free(self, frame: Frame) -> None:
        self._shared.take_back_from(self, frame.call_id)

    def _on_goodbye(self, _: Frame) -> None:
        self.status.on_goodbye()

    def say_goodbye(self) -> None:
        """Tell the peer that no further request is sent or accepted."""
        self.connection.send(FrameKind.GOODBYE, 0)

    def on_lost(self, reason: str) -> None:
        """The connection has ended: fail what waits, cancel what it runs."""
        self.status.on_lost(reason)
        self.calls.on_lost(self.credit.close())
        self.responder.on_lost()
