"""The calls of this worker to one peer, and their answers: results, errors, items.

Everything here runs on the event loop, and nothing waits: callers wait for futures.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Any, Final

from asyncrpc.core.calls.common_arguments import CommonArguments
from asyncrpc.core.calls.context import Deadlines
from asyncrpc.core.calls.credit import (
    UNCOUNTED_BUFFERS_MAX,
    LinkCredit,
    item_bytes,
    request_bytes,
)
from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.heads import SentHeads
from asyncrpc.core.calls.machine.calls import LinkState, LinkStatus, PendingCalls
from asyncrpc.core.calls.message_codec import (
    CODEC,
    NO_META,
    MessageCodec,
    answer_meta,
    may_be_deferred,
    unreadable,
)
from asyncrpc.core.calls.packing import RequestPacking
from asyncrpc.core.calls.peer_memory import FREE_BYTES_MAX
from asyncrpc.core.calls.ports import (
    CallConnection,
    CallHost,
    CallLink,
)
from asyncrpc.core.calls.streams import OutboundCall, StreamReceiver
from asyncrpc.core.calls.tracing import with_span
from asyncrpc.core.calls.unsent import never_sent
from asyncrpc.core.devices.maps import DEVICES, DeviceMap
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.loop.clock import NO_LIMIT_NS, Deadline
from asyncrpc.core.options import PLAIN, CallOptions
from asyncrpc.core.serde import (
    Compression,
    Encoded,
    compression_named,
    is_packed,
    rebuild_exception,
)
from asyncrpc.core.serde.by_value import CodeName
from asyncrpc.core.services.extensions import NOTE
from asyncrpc.core.services.schema import Notice, Request, kind_of
from asyncrpc.core.trace.events import CANCELLED, OK, outcome_of
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.core.trace.ring import plain
from asyncrpc.core.wire.frames import (
    INLINE_BYTES_MAX,
    Flags,
    Frame,
    FrameKind,
    Meta,
    pack_head,
    prefix,
    unpack_head,
)
from asyncrpc.core.wire.outgoing import (
    OutgoingEvent,
    OutgoingMessage,
    OutgoingState,
)
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DeadlineExceededError,
    MalformedError,
    Outcome,
    RejectedError,
    RemoteProtocolError,
    WorkerLostError,
)

# Members of an enum take 0.1 us to find.
_REQUEST: Final = int(FrameKind.REQUEST)
_OPEN: Final = LinkState.OPEN

# How errors name the parts of a request, by whether its function has no name and so is
# among its arguments.
_LABELS: Final = (("args", "kwargs"), ("function, args", "kwargs"))

logger = logging.getLogger("asyncrpc")
_TOKENS: Final = kind_of(list[int])
_ARRIVING_MAX: Final = 1 << 12
_LOST = WorkerLostError.__name__


class OutboundCalls:
    """The calls of this worker to one peer."""

    def __init__(
        self,
        link: CallLink,
        peer: WorkerId,
        host: CallHost,
        *,
        connection: CallConnection,
        pending: PendingCalls[OutboundCall],
        status: LinkStatus,
        credit: LinkCredit,
        messages: MessageCodec,
        ends: CallEnds,
    ) -> None:
        self._link = link
        self._host = host
        self._to = peer.name
        self._loop = host.loop
        self._connection = connection
        self._pending = pending
        self._status = status
        self._credit = credit
        self._messages = messages
        self._ends = ends
        self._now_s = host.recorder.now_s
        self._heads = SentHeads()
        self._packing = RequestPacking(host)
        self._codec = host.codec
        self._compression = host.options.network.compression_to(peer.name)
        self._device_map = host.options.devices.map_to(peer.name)
        self._deadlines = Deadlines(host.loop, self._expire)
        self._is_plain = self._compression is None and self._device_map is None
        # Used for every call.
        self._encode = messages.encode
        self._open = pending.open
        self._send = connection.send
        self._numbered = self._heads.numbered

    def start(
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        value: tuple[list[Any], dict[str, Any]],
        *,
        deadline: Deadline | None = None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Send a call; its future completes when the answer comes.

        Args:
            call: the future; its `function` and `to` are set.
            target: name of a function; None if the callable is the first argument; a
                list for what an extension resolves.
        """
        budget_ns = self._budget_ns(call.function, deadline)
        if self._host.tracer is not None:
            meta = with_span(meta, call.span)
        if call.options is not PLAIN or not self._is_plain:
            meta = self._map_devices(call, call.options, meta)
            compression = self._compression_of(call)
            if compression is not None:
                self._pack_and_send(call, target, value, deadline, meta, compression)
                return
        encoded, call.pins, meta = self._encode(
            list(value), meta, _LABELS[target is None], None, call.device_map
        )
        self._send_request(call, target, encoded, budget_ns, deadline, meta)

    def start_common(
        self,
        call: CallFuture[Any],
        target: str | None,
        common: CommonArguments,
        *,
        deadline: Deadline | None,
        meta: dict[str, Any] | None = None,
    ) -> None:
        """Send a call whose arguments go to several peers; otherwise like `start`."""
        budget_ns = self._budget_ns(call.function, deadline)
        if self._host.tracer is not None:
            meta = with_span(meta, call.span)
        meta = self._map_devices(call, call.options, meta)
        compression = self._compression_of(call)
        if compression is not None:
            self._pack_and_send(call, target, common, deadline, meta, compression)
            return
        encoded, call.pins, meta = self._messages.encode_common(
            common, _LABELS[target is None], meta, None, call.device_map
        )
        self._send_request(call, target, encoded, budget_ns, deadline, meta)

    def _map_devices(
        self,
        call: OutboundCall,
        options: CallOptions,
        meta: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """Note the device map of a call, if it has one, and add it to its meta."""
        device_map = self._device_map
        if options.device_map is not None:
            device_map = DeviceMap.parse(options.device_map)
        if device_map is None:
            return meta
        call.device_map = device_map
        return {**(meta or NO_META), DEVICES: device_map.wire}

    def _compression_of(self, call: CallFuture[Any]) -> Compression | None:
        codec = call.options.codec
        return self._compression if codec is None else compression_named(codec)

    def _pack_and_send(  # noqa: PLR0917
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        value: tuple[list[Any], dict[str, Any]] | CommonArguments,
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
        compression: Compression,
    ) -> None:
        """Encode a call's arguments, apply a codec, and send them."""
        meta = {**(meta or NO_META), CODEC: compression.name}
        common = value if isinstance(value, CommonArguments) else CommonArguments(value)
        encoded, call.pins, meta = self._messages.encode_common(
            common, _LABELS[target is None], meta, compression, call.device_map
        )

        def send(packed: Encoded) -> None:
            budget_ns = self._budget_ns(call.function, deadline)
            if packed.code:
                self._messages.await_code(packed, packed.code)
            self._send_request(call, target, packed, budget_ns, deadline, meta)

        self._packing.pack(
            call,
            encoded,
            common,
            codec=compression.name,
            send=send,
            deadline=deadline,
        )

    def _send_request(  # noqa: PLR0917
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        encoded: Encoded,
        budget_ns: int,
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
    ) -> None:
        """Open a call whose arguments have been encoded, and write its request."""
        call_id = call.call_id = self._open(call)
        call.link = self._link
        nbytes = 0
        if encoded.buffers:
            stats = call.stats
            stats.bytes_copied += encoded.bytes_copied
            for buffer in encoded.buffers:
                stats.bytes_sent += buffer.nbytes
            nbytes = stats.bytes_sent
        if call.destination is not None:
            call.destination.claim(self._connection, call_id)
        if deadline is not None:
            self._watch(call, deadline, meta)
        if (
            nbytes > FREE_BYTES_MAX
            or len(encoded.control) > FREE_BYTES_MAX
            or (nbytes and is_packed(encoded.control))
            or len(encoded.buffers) > UNCOUNTED_BUFFERS_MAX
        ) and not self._spend(call, encoded):
            self._await_credit(call, target, encoded, deadline, meta)
            return
        try:
            head = None
            if type(target) is CodeName:
                self._messages.await_function(encoded, target)
            elif not meta and type(target) is str:
                head = self._numbered.get(target)
            self._send(
                _REQUEST,
                call_id,
                aux=budget_ns,
                head=head or self._head(target, meta, encoded),
                control=encoded.control,
                buffers=encoded.buffers,
                on_sent=None if call.pins is None else call.pins.on_sent,
            )
        except BaseException:
            self._unsend(call, target)
            raise

    def _spend(self, call: OutboundCall, encoded: Encoded) -> bool:
        """Take a request's bytes from the credit; return False if it must wait."""
        lengths = [buffer.nbytes for buffer in encoded.buffers]
        nbytes = request_bytes(encoded.control, len(encoded.control), lengths)
        if nbytes <= FREE_BYTES_MAX:
            return True
        call.request_bytes = nbytes
        return self._credit.waiting.spend(nbytes)

    def _unsend(self, call: OutboundCall, target: str | list[Any] | None) -> None:
        """Forget a call whose request could not be written."""
        self._pending.take(call.call_id)
        call.settle()
        if call.pins is not None:
            call.pins.undo()
            call.pins = None
        self._heads.forget(target)

    def _await_credit(
        self,
        call: OutboundCall,
        target: str | list[Any] | None,
        encoded: Encoded,
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
    ) -> None:
        """Keep a large request back until the peer has room for it."""
        if type(target) is CodeName:  # before the message takes its buffers
            try:
                self._messages.await_function(encoded, target)
            except BaseException:
                self._unsend(call, target)
                raise
        outgoing = self._connection.outgoing
        message = OutgoingMessage(
            _REQUEST,
            call.call_id,
            flags=Flags.STREAM if isinstance(call, StreamReceiver) else 0,
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if call.pins is None else call.pins.on_sent,
        )
        if isinstance(encoded.buffers, PendingBuffers):
            encoded.buffers.message = message

        def send() -> None:
            try:
                message.aux = self._rest_ns(deadline)
                message.head = self._head(target, meta, encoded)
                self._connection.submit(message)
            except BaseException as error:  # noqa: BLE001  (it is the call's)
                outgoing.forget(message)
                self._return_credit(call)
                self._unsend(call, target)
                call.fail(error)

        take_back = partial(self._credit.withdraw, call.call_id)
        outgoing.wait(message, OutgoingEvent.AWAIT_CREDIT, take_back)
        self._credit.wait(call.call_id, call.request_bytes, send)

    def _rest_ns(self, deadline: Deadline | None) -> int:
        return deadline.budget_ns(self._loop.time()) if deadline else NO_LIMIT_NS

    def ask(
        self,
        request: Request[Any],
        *,
        deadline: Deadline | None = None,
        device_map: DeviceMap | None = None,
    ) -> CallFuture[Any]:
        """Send a request to a service of the peer; the future holds its answer.

        Its tensors go where `device_map` says, and those of the answer by its inverse.
        """
        name = request.name
        if self._status.is_lost:
            self._host.check_running()
            call = self._service_call(name)
            call.fail(self._lost_error(name, Outcome.NOT_EXECUTED))
            return call
        budget_ns = self._budget_ns(name, deadline)
        encoded, pins, _ = self._encode(
            request.pack(), None, request.labels, None, device_map
        )
        head = request.head
        if device_map is not None:
            more = {DEVICES: device_map.wire}
            head = pack_head([request.service, request.method, more])
        # Not before: a refused call would wait for ever.
        call = self._service_call(name)
        call.device_map, call.pins = device_map, pins
        call.call_id = self._open(call)
        call.link = self._link
        if deadline is not None:
            call.allowed_s = deadline.allowed_s
            call.watch = self._deadlines.watch(call, deadline)
        self._send(
            FrameKind.SERVICE,
            call.call_id,
            aux=budget_ns,
            head=head,
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if pins is None else pins.on_sent,
        )
        return call

    def _service_call(self, name: str) -> CallFuture[Any]:
        return CallFuture(
            loop=self._loop,
            function=name,
            to=self._to,
            began_s=self._now_s(),
            is_on_loop=True,
        )

    def tell(self, notice: Notice, *, at_once: bool = False) -> None:
        """Send a message to a part of the peer, with the next one or in the next turn.

        A notice whose class lets it wait may do so for some milliseconds.
        """
        control = self._codec.encode_plain(notice.pack())
        part = prefix(FrameKind.NOTICE, 0, head=notice.head, control=control)
        if at_once:
            self._connection.push(part)
        elif notice.may_wait_s:
            self._connection.hold(part, notice.may_wait_s)
        else:
            self._connection.join(part)

    def start_stream(
        self,
        stream: StreamReceiver,
        target: str | None,
        value: tuple[list[Any], dict[str, Any]],
        deadline: Deadline | None,
        meta: dict[str, Any] | None = None,
        *,
        options: CallOptions,
    ) -> None:
        """Ask for a stream; its items arrive in `stream`."""
        meta = self._map_devices(stream, options, meta)
        encoded, stream.pins, meta = self._encode(
            list(value), meta, _LABELS[target is None], None, stream.device_map
        )
        stream.call_id = self._open(stream)
        if not self._spend(stream, encoded):
            self._await_credit(stream, target, encoded, deadline, meta)
            return
        try:
            if type(target) is CodeName:
                self._messages.await_function(encoded, target)
            self._send(
                _REQUEST,
                stream.call_id,
                flags=Flags.STREAM,
                aux=self._rest_ns(deadline),
                head=self._head(target, meta, encoded),
                control=encoded.control,
                buffers=encoded.buffers,
                on_sent=None if stream.pins is None else stream.pins.on_sent,
            )
        except BaseException:
            self._unsend(stream, target)
            raise

    def send_credit(self, call_id: int, items: int) -> None:
        """Tell a stream's producer that items have been taken."""
        self._send(FrameKind.STREAM_CREDIT, call_id, aux=items)

    def cancel(self, call: OutboundCall) -> None:
        """Tell the callee that the caller has gone, unless the call has ended."""
        if self._pending.get(call.call_id) is not call:
            return
        self._pending.take(call.call_id)
        self._ends.note_given_up(call)
        call.settle()
        waited_for = self._connection.drop(_REQUEST, call.call_id)
        if waited_for is not None and call.pins is not None:
            call.pins.undo()
        if waited_for is OutgoingState.NO_CREDIT:
            return  # of which the peer has heard nothing, or has been told
        unsent_bytes = 0 if waited_for is None else call.request_bytes
        self._send(FrameKind.CANCEL, call.call_id, aux=unsent_bytes)

    def _return_credit(self, call: OutboundCall) -> None:
        """Give back the credit of a request of which nothing was or will be sent."""
        self._send(FrameKind.CANCEL, call.call_id, aux=call.request_bytes)

    def _budget_ns(self, function: str, deadline: Deadline | None) -> int:
        if self._status.state is not _OPEN:
            raise self._refusal(function)
        if deadline is None:
            return NO_LIMIT_NS
        budget_ns = deadline.budget_ns(self._loop.time())
        if not budget_ns:
            raise never_sent(function, self._to, deadline.allowed_s)
        return budget_ns

    def _refusal(self, function: str) -> AsyncRpcError:
        """Return why no call can be sent any more."""
        if self._status.is_lost:
            return self._lost_error(function, Outcome.NOT_EXECUTED)
        return RejectedError(
            "the worker is shutting down",
            function=function,
            to=self._to,
            outcome=Outcome.NOT_EXECUTED,
        )

    def _lost_error(self, function: str, outcome: Outcome) -> WorkerLostError:
        return WorkerLostError(
            f"the worker is gone: {self._status.lost_because}",
            function=function,
            to=self._to,
            outcome=outcome,
        )

    def _watch(
        self, call: CallFuture[Any], deadline: Deadline, meta: Meta | None
    ) -> None:
        """Fail the call at its deadline; for a remote(), the owner fails the value."""
        call.allowed_s = deadline.allowed_s
        if not meta or "r" not in meta:
            call.watch = self._deadlines.watch(call, deadline)

    def _expire(self, call: CallFuture[Any]) -> None:
        """Fail a call whose deadline has passed, and tell the callee."""
        call.watch = None
        has_waited = call.call_id in self._credit.waiting
        self.cancel(call)
        if has_waited:
            error = never_sent(call.function, call.to, call.allowed_s)
            error.add_note(
                f"the request of {call.request_bytes} bytes was waiting for credit "
                f"from {call.to!r}, whose limit is LimitOptions.inbound_bytes_max"
            )
            call.fail(error)
            return
        call.fail(
            DeadlineExceededError(
                function=call.function,
                to=call.to,
                outcome=Outcome.UNKNOWN,
                timeout_s=call.allowed_s,
            )
        )

    def on_lost(self, waited: set[int]) -> None:
        """Fail every call: the connection has ended."""
        self._deadlines.close()
        first_unsent = self._connection.first_unsent
        for call in self._pending.take_all():
            call.settle()
            call.pins = None  # the peer's death settles its loans
            outcome = call.outcome_if_lost
            if call.call_id in waited or call.call_id >= first_unsent:
                outcome = Outcome.NOT_EXECUTED
            self._ends.note_lost(call)
            call.fail(self._lost_error(call.function, outcome))

    def _head(
        self, target: str | list[Any] | None, meta: Meta | None, encoded: Encoded
    ) -> bytes:
        """Return the head of a request.

        Only a request that nothing can overtake gives its function a number: one with
        a deferred payload, or a codec, may come last, or be given up.
        """
        head = self._heads.known(target, meta)
        if head:
            return head
        assert type(target) is str  # all others are known
        return self._heads.introduce(
            target,
            meta,
            may_come_late=may_be_deferred(encoded)
            or encoded.payload_bytes > INLINE_BYTES_MAX
            or bool(meta and CODEC in meta),
        )


def _unreadable_answer(
    raised: BaseException, call: CallFuture[Any] | StreamReceiver
) -> AsyncRpcError:
    """Return the error about an answer that cannot be read: the function has run."""
    error = unreadable(raised)
    if isinstance(error, CallError):
        error.function, error.to = call.function, call.to
        error.outcome = Outcome.EXECUTED
    return error


class AnswerReceiver:
    """Takes what the peer answers."""

    def __init__(
        self,
        peer: WorkerId,
        host: CallHost,
        *,
        connection: CallConnection,
        pending: PendingCalls[CallFuture[Any] | StreamReceiver],
        messages: MessageCodec,
        calls: OutboundCalls,
        ends: CallEnds,
    ) -> None:
        self._peer = peer
        self._functions = host.functions
        self._references = host.references
        self._connection = connection
        self._pending = pending
        self._messages = messages
        self._calls = calls
        self._ends = ends
        self._note = ends.note
        # Used for every answer.
        self._decode = messages.decode
        self._take_over = messages.take_over
        self._get, self._end = pending.get, pending.end
        self._arriving: set[int] = set()  # calls whose answers arrive

    def is_wanted(self, kind: int, call_id: int, nbytes: int) -> bool:
        """Return whether the payload of an answer is wanted that begins to arrive."""
        self._pending.check(call_id)
        call = self._get(call_id)
        if call is None:
            return False
        if kind == FrameKind.STREAM_ITEM:
            if isinstance(call, StreamReceiver):
                call.on_item_begun(nbytes)
            return isinstance(call, StreamReceiver)
        if call_id in self._arriving:
            raise MalformedError(f"call {call_id} is answered twice")
        if len(self._arriving) > _ARRIVING_MAX:  # some have been given up
            self._arriving &= self._pending.calls.keys()
        self._arriving.add(call_id)
        return True

    def on_response(  # noqa: C901  (of every call: no steps)
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take the result of a call."""
        meta = answer_meta(head) if head else NO_META
        call = self._get(call_id)
        if not isinstance(call, CallFuture):
            self._refuse_kind(call, call_id)
            self._discard(control, buffers, meta)
            return
        self._end(call_id)
        if call.watch is not None or call.begun is not None or call.destination:
            call.settle()
        if call.pins is not None:
            call.pins = None
        if meta:
            call.note = meta.get(NOTE)
            self._take_back(meta)
        if buffers:
            stats = call.stats
            stats.bytes_copied += self._connection.message_bytes_copied
            for buffer in buffers:
                stats.bytes_received += buffer.nbytes
        try:
            value, loans = self._decode(control, buffers, meta)
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            error = _unreadable_answer(raised, call)
            self._note(call, outcome_of(error))
            call.fail(error)
            return
        self._note(call, OK)
        if call.destination is not None:
            call.destination.deliver(call, value, buffers)
        elif not call.done():
            call.set_result(value)
        if loans is not None:
            self._take_over(loans)

    def on_error(
        self,
        _flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take the error of a call or a stream."""
        call = self._pending.get(call_id)
        meta = answer_meta(head)
        if aux < 0:
            raise MalformedError(f"an error must follow at least 0 items, not {aux}")
        if call is None:
            self._pending.take(call_id)  # refuses an answer that the peer made up
            self._discard(control, buffers, meta)
            return
        call.settle()
        call.note = meta.get(NOTE)
        self._release_pins(call, meta)
        try:
            tree = self._messages.decode_error(control, buffers)
            error: AsyncRpcError = rebuild_exception(
                tree, self._functions, function=call.function, to=call.to
            )
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            error = _unreadable_answer(raised, call)
        if isinstance(error, CallError):
            outcome_name = str(meta.get("o", ""))
            error.outcome = Outcome.__members__.get(outcome_name, error.outcome)
        if isinstance(call, CallFuture):
            self._pending.take(call_id)
            self._note(call, outcome_of(error))
            call.fail(error)
        else:
            call.on_error(error, aux)
            self._end_if_whole(call)

    def on_stream_item(
        self,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        """Take one item of a stream."""
        stream = self._pending.get(call_id)
        if not isinstance(stream, StreamReceiver):
            self._refuse_kind(stream, call_id)
            self._messages.give_back(control, buffers)  # the consumer has gone
            return
        record = unpack_head(head)
        meta = record[1] if len(record) > 1 and record[1] else NO_META
        serial = record[0] if record and type(record[0]) is int else -1
        if serial < 0 or stream.has(serial):
            raise MalformedError(
                f"an item of a stream must have a new number, not {serial}"
            )
        nbytes = item_bytes(control, buffers)
        stream.check_ahead()
        try:
            value, loans = self._decode(control, buffers, meta)
        except BaseException as raised:  # noqa: BLE001  (a value's own code may run)
            stream.on_error(_unreadable_answer(raised, stream), 0)
            self._calls.cancel(stream)
            return
        if NOTE in meta:
            stream.note = meta[NOTE]
        stream.on_item(serial, value, nbytes)
        self._end_if_whole(stream)
        if loans is not None:
            self._take_over(loans)

    def on_stream_end(self, frame: Frame) -> None:
        """Take the end of a stream, with its number of items."""
        stream = self._pending.get(frame.call_id)
        if not isinstance(stream, StreamReceiver):
            self._refuse_kind(stream, frame.call_id)
            self._take_back(answer_meta(frame.head))
            return
        self._check_count(stream, frame.aux)
        meta = answer_meta(frame.head)
        stream.note = meta.get(NOTE, stream.note)
        self._release_pins(stream, meta)
        stream.on_end(frame.aux)
        self._end_if_whole(stream)

    def _refuse_kind(self, call: object, call_id: int) -> None:
        """Refuse an answer that its call cannot have; a call given up may have any."""
        self._pending.check(call_id)
        if call is not None:
            raise MalformedError(f"call {call_id} is answered as another kind of call")

    def _check_count(self, stream: StreamReceiver, items: int) -> None:
        """Refuse the end of a stream that counts fewer items than have come."""
        if items < stream.received:
            raise MalformedError(
                f"a stream ends after {items} items, but {stream.received} have come"
            )

    def _end_if_whole(self, stream: StreamReceiver) -> None:
        """Forget a stream once its end and all items are here: the end may overtake."""
        if stream.is_whole:
            self._pending.take(stream.call_id)
            self._ends.note_stream(stream, outcome_of(stream.error))

    def _release_pins(self, call: CallFuture[Any] | StreamReceiver, meta: Meta) -> None:
        """Release the pins of a request, which has been answered."""
        call.pins = None
        self._take_back(meta)

    def _take_back(self, meta: Meta) -> None:
        """Take back the loans of a request; a bad loan does not spoil the answer."""
        references = self._references
        if references is None or "l" not in meta:
            return
        try:
            tokens = _TOKENS.read_as("the loans that an answer returns", meta["l"])
            references.take_back(self._peer.incarnation, tokens)
        except RemoteProtocolError as error:
            logger.warning("from worker %r: %s", self._peer.name, error)

    def _discard(self, control: bytes, buffers: list[memoryview], meta: Meta) -> None:
        """Discard an answer whose caller has gone: give back its loans."""
        self._take_back(meta)
        self._messages.give_back(control, buffers)


class CallEnds:
    """Notes how the calls of this worker to one peer end."""

    __slots__ = ("_calls", "_now_s", "_streams", "_to")

    def __init__(self, to: WorkerId, recorder: FlightRecorder) -> None:
        self._to = plain(to)
        self._now_s = recorder.now_s
        self._calls = recorder.calls
        self._streams = recorder.received

    def note(self, call: CallFuture[Any], outcome: str) -> None:
        """Record a call that has been answered."""
        moved = call.moved
        self._calls.record(
            (
                self._now_s(),
                call.began_s,
                self._to,
                call.function,
                call.call_id,
                outcome,
                0 if moved is None else moved.bytes_sent,
                0 if moved is None else moved.bytes_received,
                call.task,
            )
        )

    def note_stream(self, stream: StreamReceiver, outcome: str) -> None:
        """Record a stream that has ended."""
        self._streams.record(
            (
                self._now_s(),
                stream.began_s,
                self._to,
                stream.function,
                stream.call_id,
                outcome,
                stream.received,
                stream.task,
            )
        )

    def note_given_up(
        self, call: CallFuture[Any] | StreamReceiver, outcome: str = CANCELLED
    ) -> None:
        """Record a call that its caller gave up; a stream may have failed before."""
        if isinstance(call, StreamReceiver):
            failed = call.error
            self.note_stream(call, outcome if failed is None else outcome_of(failed))
        else:
            self.note(call, outcome)

    def note_lost(self, call: CallFuture[Any] | StreamReceiver) -> None:
        """Record a call whose peer is lost."""
        self.note_given_up(call, _LOST)

    def note_unsent(self, call: CallFuture[Any]) -> None:
        """Record a call that has ended, and was never sent."""
        self.note(call, CANCELLED if call.cancelled() else outcome_of(call.failure))
