"""Messages that must be prepared before they are read: unpacked, or put on devices.

Both are done in threads.  For the receiver, such a message arrives a little later, like
one with a large payload.  The other direction is in `packing` and `inbound`: an
encoded message is packed in a thread and then sent.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.machine.calls import LinkStatus, PendingCalls
from asyncrpc.core.calls.message_codec import DecodedBuffers
from asyncrpc.core.calls.peer_memory import FREE_BYTES_MAX
from asyncrpc.core.devices.maps import DEVICES, IDENTITY, DeviceMap
from asyncrpc.core.serde import (
    DevicePlacement,
    PackedMessage,
    Staged,
    is_packed,
    is_staged,
    unreadable,
)
from asyncrpc.core.serde.exceptions import words_of
from asyncrpc.core.wire.frames import FrameKind, unpack_head
from asyncrpc.errors import (
    CallError,
    DecodeError,
    MalformedError,
    OverloadedError,
    RejectedError,
    RemoteProtocolError,
)

if TYPE_CHECKING:
    from asyncrpc.core.calls.message_codec import MessageCodec
    from asyncrpc.core.calls.ports import CallConnection, CallHost

# Packed, or unpacked, on the loop itself: 64 KiB take 20 us by bf16, 80 us by zstd, 160
# by both int8 and zstd; to go to a thread and back takes as long.
PACK_HERE_BYTES_MAX: Final = 64 << 10

# What the messages of one link that are unpacked in threads at a time may become; a
# larger one is alone.  While others wait for them, nothing is read from the link.
UNPACKING_BYTES_MAX: Final = 64 << 20

# Messages that may be packed.
_PACKED: Final = (FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.STREAM_ITEM)

Deliver = Callable[[bytes, list[memoryview]], None]


@dataclass(slots=True)
class _PendingMessage:
    """A message that is being prepared, and what it cost."""

    kind: int
    call_id: int
    head: bytes
    arrived_bytes: int
    copied_bytes: int
    deliver: Deliver
    control: bytes  # as it arrived


class MessagePreparation:
    """The messages of one link that are being prepared."""

    __slots__ = (
        "_cancelled",
        "_codec",
        "_connection",
        "_count",
        "_expand",
        "_host",
        "_limit",
        "_pending",
        "_read_head",
        "_requests",
        "_status",
        "_unpacking_bytes",
        "_unread",
        "_waiting",
    )

    def __init__(
        self,
        host: CallHost,
        *,
        limit: int,
        connection: CallConnection,
        pending: PendingCalls[Any],
        status: LinkStatus,
        unread: MessageCodec,
        read_head: Callable[[bytes], object],
        expand: Callable[[int, int], None],
    ) -> None:
        """Prepare messages.

        Args:
            status: of the link; once it is lost, nothing is delivered.
        """
        self._host = host
        self._codec = host.codec
        self._limit = limit
        self._connection = connection
        self._pending = pending
        self._status = status
        self._unread = unread
        self._read_head = read_head
        self._expand = expand
        self._count = 0
        self._unpacking_bytes = 0
        self._waiting: deque[tuple[PackedMessage, _PendingMessage]] = deque()
        self._requests: set[int] = set()
        self._cancelled: set[int] = set()

    def take(
        self,
        kind: int,
        call_id: int,
        control: bytes,
        buffers: list[memoryview],
        *,
        head: bytes,
        deliver: Deliver,
    ) -> None:
        """Take a message; deliver it once its preparation has ended or failed.

        Args:
            deliver: called with the control part and the buffers, unpacked, and with
                the tensors for devices there (`serde.Staged`); on failure, with a
                control part that says why.
        """
        if kind not in _PACKED and is_packed(control):
            raise MalformedError(f"a packed {FrameKind(kind).name} came")
        arrived_bytes = sum(buffer.nbytes for buffer in buffers)
        arrival = _PendingMessage(
            kind, call_id, head, arrived_bytes, 0, deliver, control
        )
        if not is_packed(control):
            self._place(arrival, control, buffers)
            return
        try:
            parcel = self._codec.open(control, buffers)
        except DecodeError as error:
            self._deliver(arrival, unreadable(error.problem), [])
            return
        if kind == FrameKind.REQUEST and parcel.expansion_bytes > FREE_BYTES_MAX:
            try:
                self._expand(call_id, parcel.expansion_bytes)
            except OverloadedError as error:
                refused = DecodedBuffers([], loans=[], error=error)
                self._deliver(arrival, unreadable(error.problem), refused)
                return
        arrival.copied_bytes += parcel.unpacked_bytes
        if parcel.unpacked_bytes <= PACK_HERE_BYTES_MAX:
            self._place(arrival, *_unpacked(parcel))
        else:
            self._unpack(parcel, arrival)

    def cancel(self, call_id: int) -> bool:
        """Drop a request, but give back its references; return whether it is here."""
        if call_id not in self._requests:
            return False
        self._cancelled.add(call_id)
        return True

    def _unpack(self, parcel: PackedMessage, arrival: _PendingMessage) -> None:
        """Unpack a message in a thread, now or when others have been unpacked."""
        self._note(arrival)
        self._waiting.append((parcel, arrival))
        if not self._begin_unpacking() and len(self._waiting) == 1:
            self._connection.turns.hold()

    def _begin_unpacking(self) -> bool:
        """Unpack the messages for which there is room; return whether none waits."""
        while self._waiting:
            parcel, arrival = self._waiting[0]
            nbytes = self._unpacking_bytes + parcel.unpacked_bytes
            if self._unpacking_bytes and nbytes > UNPACKING_BYTES_MAX:
                return False
            self._waiting.popleft()
            self._unpacking_bytes = nbytes
            self._submit(parcel, arrival)
        return True

    def _submit(self, parcel: PackedMessage, arrival: _PendingMessage) -> None:
        def done(result: Any, error: BaseException | None) -> None:
            self._unpacking_bytes -= parcel.unpacked_bytes
            if error is not None:  # no memory, say
                result = unreadable(words_of(error)), []
            if self._status.is_lost:
                self._waiting.clear()
            elif self._waiting and self._begin_unpacking():
                self._connection.turns.resume()
            self._on_unpacked(arrival, *result)

        try:
            self._host.host_pool.submit(lambda: _unpacked(parcel), done)
        except RejectedError:  # the worker is closing, and has no threads
            done(_unpacked(parcel), None)

    def _note(self, arrival: _PendingMessage) -> None:
        """Record that a message is in threads from now on."""
        # Later the connection no longer knows what of this message it has copied.
        arrival.copied_bytes += self._connection.message_bytes_copied
        self._count += 1
        if arrival.kind == FrameKind.REQUEST:
            self._requests.add(arrival.call_id)

    def _on_unpacked(
        self, arrival: _PendingMessage, control: bytes, buffers: list[memoryview]
    ) -> None:
        if is_staged(control) and not self._status.is_lost:
            self._move_tensors(arrival, control, buffers)
        else:
            self._end(arrival, control, buffers)

    # --- on devices ------------------------------------------------------------------

    def _place(
        self, arrival: _PendingMessage, control: bytes, buffers: list[memoryview]
    ) -> None:
        """Deliver a message, once its tensors are on their devices if it has any."""
        if not is_staged(control):
            self._deliver(arrival, control, buffers)
        elif self._count >= self._limit:
            self._deliver(arrival, unreadable("too many messages for devices"), [])
        else:
            self._note(arrival)
            self._move_tensors(arrival, control, buffers)

    def _move_tensors(
        self, arrival: _PendingMessage, control: bytes, buffers: list[memoryview]
    ) -> None:
        """Move the tensors of a message to their devices."""
        limits = self._codec.limits
        try:
            device_map = self._device_map_of(arrival)
            landing = DevicePlacement(control, buffers, limits, device_map.target)
        except (DecodeError, MalformedError) as error:
            self._end(arrival, unreadable(str(error)), [])
            return

        def done(tensors: dict[int, torch.Tensor], error: BaseException | None) -> None:
            if error is not None:
                self._end(arrival, unreadable(_problem(error)), [])
            else:
                self._end(arrival, control, Staged(buffers, tensors))

        self._host.devices.place(landing.wanted, done)

    def _device_map_of(self, arrival: _PendingMessage) -> DeviceMap:
        """Return the device map for the tensors of a message from the peer."""
        if arrival.kind in (FrameKind.REQUEST, FrameKind.SERVICE):
            record = unpack_head(arrival.head)
            meta = record[-1] if len(record) > 1 else None
            if type(meta) is dict and DEVICES in meta:
                return DeviceMap.from_wire(meta[DEVICES])
            return IDENTITY
        call = self._pending.get(arrival.call_id)
        device_map = None if call is None else call.device_map
        return IDENTITY if device_map is None else device_map.inverse()

    # --- handing on ------------------------------------------------------------------

    def _end(
        self, arrival: _PendingMessage, control: bytes, buffers: list[memoryview]
    ) -> None:
        """Deliver a message that was in threads, unless it is of no use any more."""
        self._count -= 1
        call_id = arrival.call_id
        is_cancelled = False
        if arrival.kind == FrameKind.REQUEST:
            self._requests.discard(call_id)
            is_cancelled = call_id in self._cancelled
            self._cancelled.discard(call_id)
        if self._status.is_lost:
            return
        try:
            if is_cancelled:
                self._read_head(arrival.head)
                self._unread.give_back(control)
            else:
                self._deliver(arrival, control, buffers)
        except RemoteProtocolError as error:
            self._connection.fail(error)

    def _deliver(
        self, arrival: _PendingMessage, control: bytes, buffers: list[memoryview]
    ) -> None:
        call = None
        if arrival.kind == FrameKind.RESPONSE:
            call = self._pending.get(arrival.call_id)
        if isinstance(call, CallFuture):
            received_bytes = sum(buffer.nbytes for buffer in buffers)
            call.stats.bytes_copied += arrival.copied_bytes
            call.stats.bytes_received += arrival.arrived_bytes - received_bytes
        if is_packed(control):  # it says why the message cannot be read
            self._unread.give_back(arrival.control)
        arrival.deliver(control, buffers)


def _unpacked(parcel: PackedMessage) -> tuple[bytes, list[memoryview]]:
    try:
        control, buffers = parcel.unpack()
    except DecodeError as error:
        return unreadable(error.problem), []
    return bytes(control), buffers


def _problem(error: BaseException) -> str:
    if isinstance(error, CallError):
        return error.problem
    return f"{type(error).__name__}: {error}"
