"""The calls of this worker to one peer; their answers are taken in `answers`.

Everything here runs on the event loop, and nothing waits: callers wait for futures.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Final

from asyncrpc.clock import NO_LIMIT_NS, Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    DeadlineExceededError,
    Outcome,
    RejectedError,
    WorkerLostError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls.admission import FREE_BYTES_MAX
from asyncrpc.runtime.calls.common_arguments import CommonArguments
from asyncrpc.runtime.calls.credit import UNCOUNTED_BUFFERS_MAX, request_bytes
from asyncrpc.runtime.calls.deadlines import Deadlines
from asyncrpc.runtime.calls.deferred import PendingBuffers
from asyncrpc.runtime.calls.ends import CallEnds
from asyncrpc.runtime.calls.futures import CallFuture, CallLink, task_here
from asyncrpc.runtime.calls.heads import SentHeads
from asyncrpc.runtime.calls.machine.calls import PendingCalls
from asyncrpc.runtime.calls.machine.link import LinkState, LinkStatus
from asyncrpc.runtime.calls.message_codec import (
    CODEC,
    NO_META,
    MessageCodec,
    may_be_deferred,
)
from asyncrpc.runtime.calls.outbound_ports import (
    CallCredit,
    OutboundCall,
    OutboundConnection,
    OutboundHost,
)
from asyncrpc.runtime.calls.packing import RequestPacking
from asyncrpc.runtime.calls.streams import StreamReceiver
from asyncrpc.runtime.calls.tracing import with_span
from asyncrpc.runtime.calls.unsent import never_sent
from asyncrpc.runtime.devices.maps import DEVICES, DeviceMap
from asyncrpc.runtime.messages import Notice, Request
from asyncrpc.runtime.options import PLAIN, CallOptions
from asyncrpc.serde import Compression, Encoded, compression_named, is_packed
from asyncrpc.wire.frames import INLINE_BYTES_MAX, Flags, FrameKind, prefix
from asyncrpc.wire.messages import Meta, pack_head
from asyncrpc.wire.outgoing import (
    OutgoingEvent,
    OutgoingMessage,
    OutgoingState,
)

# Members of an enum take 0.1 us to find.
_REQUEST: Final = int(FrameKind.REQUEST)
_OPEN: Final = LinkState.OPEN

# How errors name the parts of a request, by whether its function has no name and so is
# among its arguments.
_LABELS: Final = (("args", "kwargs"), ("function, args", "kwargs"))


class OutboundCalls:
    """The calls of this worker to one peer."""

    def __init__(
        self,
        link: CallLink,
        peer: WorkerId,
        host: OutboundHost,
        *,
        connection: OutboundConnection,
        pending: PendingCalls[OutboundCall],
        status: LinkStatus,
        credit: CallCredit,
        messages: MessageCodec,
        ends: CallEnds,
    ) -> None:
        """Make calls over a connection.

        Args:
            link: calls keep it, to cancel themselves.
            peer: the callee.
            host: the worker that calls.
            connection: carries the calls.
            pending: calls that have been sent and not answered.
            status: of the link.
            credit: of the peer, for large requests.
            messages: encodes arguments.
            ends: notes how calls end.
        """
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
            value: arguments and keyword arguments.
            deadline: when the caller stops waiting, and the callee working.
            meta: what travels beside the arguments.

        Raises:
            EncodeError: an argument cannot travel.  Nothing was sent.
            DeadlineExceededError: the deadline has passed.  Nothing was sent.
            RejectedError: the peer is shutting down.  Nothing was sent.
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
            if not meta and type(target) is str:
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

        Raises:
            EncodeError: the content cannot travel.  Nothing was sent.
            DeadlineExceededError: the deadline has passed.  Nothing was sent.
            RejectedError: the peer is shutting down.  Nothing was sent.
        """
        name = request.name
        if self._status.is_lost:
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
        call: CallFuture[Any] = CallFuture(
            loop=self._loop, function=name, to=self._to, began_s=self._now_s()
        )
        call.task = task_here(self._loop)
        return call

    def tell(self, notice: Notice, *, at_once: bool = False) -> None:
        """Send a message to a part of the peer, with the next one or in the next turn.

        A notice whose class lets it wait may do so for some milliseconds.

        Args:
            notice: plain (numbers, text, lists): no tensors, no references.
            at_once: whether to send it now: a peer waits for it, and the loop may be
                busy next.
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
        """Ask for a stream; its items arrive in `stream`.

        Raises:
            EncodeError: an argument cannot travel.  Nothing was sent.
        """
        meta = self._map_devices(stream, options, meta)
        encoded, stream.pins, meta = self._encode(
            list(value), meta, _LABELS[target is None], None, stream.device_map
        )
        stream.call_id = self._open(stream)
        if not self._spend(stream, encoded):
            self._await_credit(stream, target, encoded, deadline, meta)
            return
        try:
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
        """Fail every call: the connection has ended.

        Args:
            waited: the calls that waited for credit, and so never left this worker.
        """
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
