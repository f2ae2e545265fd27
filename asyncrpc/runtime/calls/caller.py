"""The caller's side of a link: calls out; their answers are in `answers`.

Everything here runs on the event loop, and nothing waits: who does, waits for a future.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.clock import NO_LIMIT_NS, Deadline
from asyncrpc.errors import (
    AsyncRpcError,
    CallError,
    DeadlineExceededError,
    Outcome,
    RejectedError,
    WorkerLostError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.calls import streams
from asyncrpc.runtime.calls.answers import Answers
from asyncrpc.runtime.calls.credit import FREE_BYTES_MAX
from asyncrpc.runtime.calls.futures import CallFuture
from asyncrpc.runtime.calls.holding import HeldBack
from asyncrpc.runtime.calls.preparing import PACK_HERE_BYTES_MAX
from asyncrpc.runtime.devices.maps import DEVICES, DeviceMap
from asyncrpc.runtime.links.core import CODEC, NO_META, CommonArguments
from asyncrpc.runtime.options import PLAIN, CallOptions
from asyncrpc.serde import (
    Compression,
    Encoded,
    compression_named,
)
from asyncrpc.wire.frames import INLINE_BYTES_MAX, Flags, FrameKind, prefix
from asyncrpc.wire.messages import Meta, pack_head

if TYPE_CHECKING:
    from asyncrpc.runtime.links.connection import Connection
    from asyncrpc.runtime.worker import Worker


# Functions one connection gives numbers to: more than any program has.
NAMES_MAX: Final = 1 << 16

_REQUEST: Final = int(FrameKind.REQUEST)  # an enum's member takes 0.1 us to find
_LABELS: Final = ("args", "kwargs")  # how errors name the parts of a request


class CallerSide(Answers):
    """What this worker asks of the peer."""

    def __init__(self, worker: Worker, peer: WorkerId, connection: Connection) -> None:
        super().__init__(worker, peer, connection)
        # The number of each function, and the head that says no more than that.
        self._sent_names: dict[str, tuple[int, bytes]] = {}
        self._names_given = 0

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
        if call.options is not PLAIN or not self.is_plain:
            meta = self._map_devices(call, call.options, meta)
            compression = self._compression_of(call)
            if compression is not None:
                self._pack_and_send(call, target, value, deadline, meta, compression)
                return
        encoded, call.pins, meta = self._encode(
            list(value), meta, _LABELS, None, call.device_map
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
        """Send a call whose arguments go to other peers, too; else as `start`."""
        budget_ns = self._budget_ns(call.function, deadline)
        meta = self._map_devices(call, call.options, meta)
        compression = self._compression_of(call)
        if compression is not None:
            self._pack_and_send(call, target, common, deadline, meta, compression)
            return
        encoded, call.pins, meta = self._encode_common(
            common, _LABELS, meta, None, call.device_map
        )
        self._send_request(call, target, encoded, budget_ns, deadline, meta)

    def _map_devices(
        self,
        call: CallFuture[Any] | streams.Inflow,
        options: CallOptions,
        meta: dict[str, Any] | None,
    ) -> dict[str, Any] | None:
        """Note the device map of a call, if it has one, and say it in its meta."""
        device_map = self.device_map
        if options.device_map is not None:
            device_map = DeviceMap.parse(options.device_map)
        if device_map is None:
            return meta
        call.device_map = device_map
        return {**(meta or NO_META), DEVICES: device_map.wire}

    def _compression_of(self, call: CallFuture[Any]) -> Compression | None:
        codec = call.options.codec
        return self.compression if codec is None else compression_named(codec)

    def _pack_and_send(  # noqa: PLR0917
        self,
        call: CallFuture[Any],
        target: str | list[Any] | None,
        value: tuple[list[Any], dict[str, Any]] | CommonArguments,
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
        compression: Compression,
    ) -> None:
        """Encode a call's arguments, apply a codec, and send them.

        What is large is packed in a thread; until then the call has not been sent.
        """
        meta = {**(meta or NO_META), CODEC: compression.name}
        common = value if isinstance(value, CommonArguments) else CommonArguments(value)
        encoded, call.pins, meta = self._encode_common(
            common, _LABELS, meta, compression, call.device_map
        )

        def send(packed: Encoded) -> None:
            budget_ns = self._budget_ns(call.function, deadline)
            self._send_request(call, target, packed, budget_ns, deadline, meta)

        if encoded.payload_bytes > PACK_HERE_BYTES_MAX or encoded.copies:
            pack = partial(common.packed, self.worker, compression.name, encoded)
            packing = self._pack_in_thread(call, encoded, pack, send, deadline)
            call.begun = self.worker.start_task(packing)
            return
        try:
            send(encoded.pack())
        except BaseException:
            self._undo_pins(call)
            raise

    async def _pack_in_thread(
        self,
        call: CallFuture[Any],
        encoded: Encoded,
        pack: Callable[[], Awaitable[Encoded]],
        send: Callable[[Encoded], None],
        deadline: Deadline | None,
    ) -> None:
        """Pack a call's arguments, then send it; whatever goes wrong, it fails."""
        self.worker.beginning += 1
        try:
            async with asyncio.timeout_at(None if deadline is None else deadline.at_s):
                if encoded.copies:
                    await self.worker.devices.fetched(encoded.copies)
                packed = await pack()
            call.begun = None
            if self.is_lost:
                call.fail(self._lost_error(call.function, Outcome.NOT_EXECUTED))
            elif not call.done():
                send(packed)
        except AsyncRpcError as error:
            if isinstance(error, CallError):
                error.function, error.to = call.function, call.to
            call.fail(error)
        except TimeoutError:
            allowed_s = 0.0 if deadline is None else deadline.allowed_s
            call.fail(self._never_sent(call.function, allowed_s))
        except asyncio.CancelledError:
            gone = "this worker was shut down before the call was sent"
            call.fail(
                WorkerLostError(
                    gone,
                    function=call.function,
                    to=call.to,
                    outcome=Outcome.NOT_EXECUTED,
                )
            )
            raise
        except Exception as error:  # noqa: BLE001  (no memory, say; the caller's)
            call.fail(error)
        finally:
            self.worker.beginning -= 1
            if call.link is None:
                self._undo_pins(call)

    def _undo_pins(self, call: CallFuture[Any]) -> None:
        """The request will never be sent: take back what it counted."""
        if call.pins is not None:
            call.pins.undo()
            call.pins = None

    def _never_sent(self, function: str, allowed_s: float) -> DeadlineExceededError:
        return DeadlineExceededError(
            function=function,
            to=self.peer.name,
            outcome=Outcome.NOT_EXECUTED,
            timeout_s=allowed_s,
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
        call_id = call.call_id = self.pending.open(call)
        call.link = self.link
        bytes_sent = 0
        if encoded.buffers:
            stats = call.stats
            stats.bytes_copied += encoded.bytes_copied
            for buffer in encoded.buffers:
                stats.bytes_sent += buffer.nbytes
            bytes_sent = stats.bytes_sent
        if call.destination is not None:
            call.destination.claim(self.connection, call_id)
        if deadline is not None:
            self._watch(call, deadline, meta)
        if bytes_sent > FREE_BYTES_MAX:
            call.request_bytes = bytes_sent
            if not self.credit.waiting.spend(bytes_sent):
                self._await_credit(call, target, encoded, deadline, meta)
                return
        try:
            self.connection.send(
                _REQUEST,
                call_id,
                aux=budget_ns,
                head=self._head(target, meta, bytes_sent),
                control=encoded.control,
                buffers=encoded.buffers,
                on_sent=None if call.pins is None else call.pins.on_sent,
            )
        except BaseException:
            self._unsend(call, target)
            raise

    def _unsend(
        self, call: CallFuture[Any] | streams.Inflow, target: str | list[Any] | None
    ) -> None:
        """Forget a call whose request could not be written."""
        self.pending.take(call.call_id)
        call.settle()
        if call.pins is not None:
            call.pins.undo()
            call.pins = None
        if type(target) is str:  # it may never have been named: name it anew
            self._sent_names.pop(target, None)

    def _await_credit(
        self,
        call: CallFuture[Any] | streams.Inflow,
        target: str | list[Any] | None,
        encoded: Encoded,
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
    ) -> None:
        """Keep a large request back until the peer has room for it."""
        overtaken, self.may_be_overtaken = self.may_be_overtaken, False
        held = encoded.buffers if type(encoded.buffers) is HeldBack else None
        if held is not None:
            held.key = (_REQUEST, call.call_id)

        def send() -> None:
            self.may_be_overtaken = overtaken
            if held is not None and held.is_released:
                encoded.buffers = list(held)
            try:
                self._send_with_credit(call, target, encoded, deadline, meta)
            except BaseException as error:  # noqa: BLE001  (it is the call's)
                self.may_be_overtaken = False
                self.return_credit(call)
                self._unsend(call, target)
                call.fail(error)

        self.credit.wait(call.call_id, call.request_bytes, send)

    def _send_with_credit(
        self,
        call: CallFuture[Any] | streams.Inflow,
        target: str | list[Any] | None,
        encoded: Encoded,
        deadline: Deadline | None,
        meta: dict[str, Any] | None,
    ) -> None:
        """Write a request for which there is credit."""
        is_stream = isinstance(call, streams.Inflow)
        self.connection.send(
            _REQUEST,
            call.call_id,
            flags=Flags.STREAM if is_stream else 0,
            aux=NO_LIMIT_NS
            if deadline is None
            else deadline.budget_ns(self.loop.time()),
            head=self._head(target, meta, call.request_bytes),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if call.pins is None else call.pins.on_sent,
        )

    def return_credit(self, call: CallFuture[Any] | streams.Inflow) -> None:
        """Give back the credit of a request of which nothing was or will be sent."""
        self.connection.send(FrameKind.CANCEL, call.call_id, aux=call.request_bytes)

    def request_service(
        self,
        service: str,
        method: str,
        value: Any,
        *,
        deadline: Deadline | None = None,
        device_map: DeviceMap | None = None,
    ) -> CallFuture[Any]:
        """Send a message to a part of the peer; the future holds its answer.

        Its tensors go where `device_map` says, and those of the answer by its inverse.

        Raises:
            EncodeError: the value cannot travel.  Nothing was sent.
            DeadlineExceededError: the deadline has passed.  Nothing was sent.
            RejectedError: the peer is shutting down.  Nothing was sent.
        """
        name = f"{service}.{method}"
        if self.is_lost:
            call = self._service_call(name)
            call.fail(self._lost_error(name, Outcome.NOT_EXECUTED))
            return call
        budget_ns = self._budget_ns(name, deadline)
        encoded, pins, _ = self._encode(value, None, device_map=device_map)
        head: list[Any] = [service, method]
        if device_map is not None:
            head.append({DEVICES: device_map.wire})
        # Not before: one that is refused would wait for ever.
        call = self._service_call(name)
        call.device_map, call.pins = device_map, pins
        call.call_id = self.pending.open(call)
        call.link = self.link
        if deadline is not None:
            call.allowed_s = deadline.allowed_s
            call.timer = self.loop.call_at(deadline.at_s, self._expire, call)
        self.connection.send(
            FrameKind.SERVICE,
            call.call_id,
            aux=budget_ns,
            head=pack_head(head),
            control=encoded.control,
            buffers=encoded.buffers,
            on_sent=None if call.pins is None else call.pins.on_sent,
        )
        return call

    def _service_call(self, name: str) -> CallFuture[Any]:
        return CallFuture(loop=self.loop, function=name, to=self.peer.name)

    def notify(
        self, service: str, method: str, value: Any, *, at_once: bool = False
    ) -> None:
        """Send a message to a part of the peer that wants no answer.

        It goes with the next message, or in the loop's next turn.

        Args:
            service: the part.
            method: the message's name.
            value: plain (numbers, text, lists): no tensors, no references.
            at_once: it goes now: a peer sleeps for it, and the loop may compute next.
        """
        control = self.codec.encode(value).control
        head = pack_head([service, method])
        write = self.connection.push if at_once else self.connection.join
        write(prefix(FrameKind.NOTICE, 0, head=head, control=control))

    def start_stream(
        self,
        inflow: streams.Inflow,
        target: str | None,
        value: tuple[list[Any], dict[str, Any]],
        deadline: Deadline | None,
        meta: dict[str, Any] | None = None,
        *,
        options: CallOptions,
    ) -> None:
        """Ask for a stream; its items arrive in `inflow`.

        Raises:
            EncodeError: an argument cannot travel.  Nothing was sent.
        """
        meta = self._map_devices(inflow, options, meta)
        encoded, inflow.pins, meta = self._encode(
            list(value), meta, _LABELS, None, inflow.device_map
        )
        inflow.call_id = self.pending.open(inflow)
        nbytes = sum(one.nbytes for one in encoded.buffers)
        if nbytes > FREE_BYTES_MAX:
            inflow.request_bytes = nbytes
            if not self.credit.waiting.spend(nbytes):
                self._await_credit(inflow, target, encoded, deadline, meta)
                return
        try:
            self._send_with_credit(inflow, target, encoded, deadline, meta)
        except BaseException:
            self._unsend(inflow, target)
            raise

    def send_credit(self, call_id: int, items: int) -> None:
        """Tell a stream's producer that items have been taken."""
        self.connection.send(FrameKind.STREAM_CREDIT, call_id, aux=items)

    def cancel(self, call: CallFuture[Any] | streams.Inflow) -> None:
        """Tell the callee that nobody waits any more."""
        if self.pending.get(call.call_id) is not call:
            return
        self.pending.take(call.call_id)
        call.settle()
        if call.request_bytes and self.credit.withdraw(call.call_id):
            if call.pins is not None:
                call.pins.undo()
            return
        never_read = self.connection.drop(FrameKind.REQUEST, call.call_id)
        if never_read and call.pins is not None:
            call.pins.undo()
        unsent_bytes = call.request_bytes if never_read else 0
        self.connection.send(FrameKind.CANCEL, call.call_id, aux=unsent_bytes)

    def _budget_ns(self, function: str, deadline: Deadline | None) -> int:
        if self.peer_drains:
            raise RejectedError(
                "the worker is shutting down",
                function=function,
                to=self.peer.name,
                outcome=Outcome.NOT_EXECUTED,
            )
        if deadline is None:
            return NO_LIMIT_NS
        budget_ns = deadline.budget_ns(self.loop.time())
        if not budget_ns:
            raise self._never_sent(function, deadline.allowed_s)
        return budget_ns

    def _watch(
        self, call: CallFuture[Any], deadline: Deadline, meta: Meta | None
    ) -> None:
        """Fail the call at its deadline; of a remote(), the owner fails the value."""
        call.allowed_s = deadline.allowed_s
        if not meta or "r" not in meta:
            call.timer = self.loop.call_at(deadline.at_s, self._expire, call)

    def _expire(self, call: CallFuture[Any]) -> None:
        call.timer = None
        has_waited = call.call_id in self.credit.waiting
        self.cancel(call)
        if has_waited:
            error = self._never_sent(call.function, call.allowed_s)
            error.add_note(
                f"its {call.request_bytes} bytes waited for room at {call.to!r}, which "
                "takes in no more at once than its Options.inbound_bytes_max"
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

    def _head(
        self, target: str | list[Any] | None, meta: Meta | None, payload_bytes: int
    ) -> bytes:
        """Route a request; a function's name travels once per connection.

        Only a request that nothing can overtake gives its function a number: one with
        a deferred payload, or a codec, may come last, or be given up.
        """
        if type(target) is not str:
            return pack_head([target, meta])
        known = self._sent_names.get(target)
        if known is not None:
            number, head = known
            return pack_head([number, meta]) if meta else head
        may_come_last = payload_bytes > INLINE_BYTES_MAX or (meta and CODEC in meta)
        overtaken, self.may_be_overtaken = self.may_be_overtaken, False
        if may_come_last or overtaken or len(self._sent_names) >= NAMES_MAX:
            return pack_head([[0, target], meta])
        # Never one that was taken before: its request may have been written.
        number = self._names_given + 1
        head = pack_head([[number, target], meta])
        self._names_given = number
        # Only now: packing may have refused.
        self._sent_names[target] = number, pack_head([number])
        return head
