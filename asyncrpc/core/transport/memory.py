"""Memory: connections between workers of one event loop.

A byte is copied once, from the sender's buffer into the one that the receiver's handler
gives.  Delivery happens in a later turn of the loop, as on a socket, so that neither
side is ever called from within its own `send`.  Ends, marks and errors are those of
sockets; `testing.network` adds delay and faults by overriding when things arrive.

A hub is a value: names in one hub mean nothing in another.
"""

from __future__ import annotations

import asyncio
import enum
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.transport.abc import (
    Buffer,
    Connector,
    Listener,
    StreamHandler,
    Transport,
)
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import LINGER_S, Gauge, WaterMarks
from asyncrpc.errors import ConnectionLostError, RefusedError, TransportError

# What one turn of the loop may deliver on one connection (100 us at 10 GB/s), lest a
# large payload keep every other task waiting.
TURN_BYTES: Final = 1 << 20


class _EndState(enum.Enum):
    OPEN = "open"
    CLOSING = "closing"  # what is queued is being delivered; what comes is dropped
    ENDED = "ended"  # connection_lost has run, or is on its way


OPEN, CLOSING, ENDED = _EndState


class MemoryTransport(Transport):
    """One end of a connection between two handlers of the same loop."""

    def __init__(
        self,
        handler: StreamHandler,
        *,
        remote: str,
        marks: WaterMarks,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._remote = remote
        self._gauge = Gauge(handler, marks)
        self._state = OPEN
        self._is_reading = True
        self._outbox: deque[memoryview] = deque()
        self._eof_sent = False
        self._eof_received = False
        self._delivery: asyncio.Handle | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._peer: MemoryTransport = self  # until `join`

    def join(self, peer: MemoryTransport) -> None:
        """Make this and `peer` the two ends of one connection."""
        self._peer, peer._peer = peer, self

    def start(self) -> None:
        """Tell the handler that it is connected."""
        if self._state is not ENDED:
            self._handler.connection_made(self)

    # --- Transport ---

    @property
    def remote(self) -> str:
        """Name of the other end."""
        return self._remote

    @property
    def scheme(self) -> str:
        """Return `mem`."""
        return "mem"

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers, in order; see `Transport.send`."""
        if self._state is not OPEN:
            return
        nbytes = 0
        for buffer in buffers:
            if size := len(buffer):
                self._outbox.append(memoryview(buffer))
                nbytes += size
        if nbytes:
            self._post(nbytes)
            self._gauge.add(nbytes)

    @property
    def queued_bytes(self) -> int:
        """Bytes that have not been delivered yet."""
        return self._gauge.queued_bytes

    def pause_reading(self) -> None:
        """Stop calling `get_buffer`; idempotent."""
        self._is_reading = False

    def resume_reading(self) -> None:
        """Undo `pause_reading`; idempotent."""
        if not self._is_reading:
            self._is_reading = True
            self._peer._schedule()  # noqa: SLF001

    def use_marks(self, marks: WaterMarks) -> None:
        """Hold back at other marks from now on; see `Transport.use_marks`."""
        self._gauge.use(marks)

    def set_handler(self, handler: StreamHandler) -> None:
        """Give everything to another handler; see `Transport.set_handler`."""
        self._handler = handler
        self._gauge.set_handler(handler)

    def close(self) -> None:
        """Deliver what is queued, then end.  Idempotent."""
        if self._state is OPEN:
            self._state = CLOSING
            self._linger = self._loop.call_later(LINGER_S, self._give_up)
            self._post(1)  # the end of the stream, which takes one place in it
            self._peer._schedule()  # noqa: SLF001  (a paused reader drops it all now)

    def abort(self) -> None:
        """End now and drop what is queued; the peer learns it.  Idempotent."""
        if self._state is not ENDED:
            self._eof_sent = True  # a reset takes its place
            self._end(None)
            self._reset_peer(
                ConnectionLostError(f"the other end, {self}, aborted the connection")
            )

    def __str__(self) -> str:
        return f"mem://{self._remote}"

    # --- when things arrive: what a simulation overrides ---

    def _post(self, nbytes: int) -> None:
        """Note that `nbytes` more places of the stream are on their way."""
        self._schedule()

    def _arrived(self) -> int:
        """Return how many places of the stream may be delivered now."""
        return TURN_BYTES

    def _schedule(self) -> None:
        """Schedule `_deliver` for when something can be delivered."""
        if self._delivery is None and self._has_work():
            self._delivery = self._loop.call_soon(self._deliver)

    def _reset_peer(self, error: TransportError) -> None:
        """Tell the peer that the connection broke."""
        self._loop.call_soon(self._peer.fail, error)

    # --- delivery ---

    def _has_work(self) -> bool:
        if self._peer.is_blocked:
            return False
        return bool(self._outbox) or (self._state is not OPEN and not self._eof_sent)

    @property
    def is_blocked(self) -> bool:
        """Return whether this end takes nothing now, because its reader is paused."""
        return self._state is OPEN and not self._is_reading

    def _deliver(self) -> None:
        self._delivery = None
        budget = min(self._arrived(), TURN_BYTES)
        while self._outbox and budget > 0 and not self._peer.is_blocked:
            budget -= self._deliver_one(budget)
        if budget > 0 and not self._outbox and self._has_work():
            self._eof_sent = True
            self._consumed(1)
            self._peer._on_eof()  # noqa: SLF001
            self._end_if_done()
        self._schedule()

    def _deliver_one(self, bytes_max: int) -> int:
        view = self._outbox[0]
        nbytes = self._peer._receive(view[:bytes_max])  # noqa: SLF001
        if not self._outbox:  # the handler aborted us
            return nbytes
        if nbytes == len(view):
            self._outbox.popleft()
        else:
            self._outbox[0] = view[nbytes:]
        self._consumed(nbytes)
        self._gauge.remove(nbytes)
        return nbytes

    def _consumed(self, nbytes: int) -> None:
        """Note that `nbytes` places of the stream have been delivered."""

    def _receive(self, view: memoryview) -> int:
        """Copy the start of `view` to where the handler wants it; drop it if closed."""
        if self._state is not OPEN:
            return len(view)
        try:
            with memoryview(self._handler.get_buffer(len(view))) as target:
                nbytes = min(len(target), len(view))
                target[:nbytes] = view[:nbytes]
            self._handler.buffer_updated(nbytes)
        except Exception as error:  # noqa: BLE001  (as asyncio does for its protocols)
            self._handler_failed(error)
            return len(view)
        return nbytes

    def _handler_failed(self, error: Exception) -> None:
        context = {"message": f"the handler of {self} failed", "exception": error}
        self._loop.call_exception_handler(context)
        lost = ConnectionLostError(f"the handler of {self} failed: {error}")
        lost.__cause__ = error
        self.fail(lost)
        self._reset_peer(ConnectionLostError(f"{self}: the other end's handler failed"))

    # --- the end ---

    def _on_eof(self) -> None:
        self._eof_received = True
        self.close()
        self._end_if_done()

    def _end_if_done(self) -> None:
        if self._eof_sent and self._eof_received and self._state is CLOSING:
            self._end(None)

    def _give_up(self) -> None:
        unsent = self.queued_bytes
        if not unsent:  # the peer still gets the end of the stream, when it reads on
            self._end(None)
            return
        self.fail(
            ConnectionLostError(
                f"closed {self} with {unsent} bytes unsent: the peer did not read them "
                f"within {LINGER_S:g} s"
            )
        )
        self._reset_peer(ConnectionLostError(f"{self} gave up: this end did not read"))

    def fail(self, error: TransportError) -> None:
        """Break this end; the other is not told."""
        if self._state is not ENDED:
            self._eof_sent = True
            self._end(error)

    def _end(self, error: TransportError | None) -> None:
        self._state = ENDED
        self._outbox.clear()
        self._gauge.clear()
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None
        self._loop.call_soon(self._handler.connection_lost, error)


class MemoryHub:
    """The names at which workers of one event loop can be reached."""

    def __init__(self, *, marks: WaterMarks | None = None) -> None:
        self._marks = marks or WaterMarks()
        self._listeners: dict[str, MemoryListener] = {}
        self._accepted = 0

    def connector(self) -> MemoryConnector:
        """Make a connector for this hub; all of them are alike."""
        return MemoryConnector(self)

    def listen(
        self, address: Address, accept: Callable[[], StreamHandler]
    ) -> MemoryListener:
        """Give a name to `accept`; see `Connector.listen`."""
        if address.host in self._listeners:
            raise TransportError(
                f"cannot listen at {address}: the name is taken; close the listener "
                f"that has it, or use another name"
            )
        listener = MemoryListener(address, accept, self._listeners)
        self._listeners[address.host] = listener
        return listener

    def connect(self, address: Address, handler: StreamHandler) -> MemoryTransport:
        """Join `handler` to what listens; see `Connector.connect`."""
        listener = self._listeners.get(address.host)
        if listener is None:
            known = ", ".join(sorted(self._listeners)) or "none"
            raise RefusedError(
                f"cannot connect to {address}: no such listener; there is: {known}"
            )
        self._accepted += 1
        ours = MemoryTransport(handler, remote=address.host, marks=self._marks)
        name = f"{address.host}#{self._accepted}"
        theirs = MemoryTransport(listener.accept(), remote=name, marks=self._marks)
        ours.join(theirs)
        asyncio.get_running_loop().call_soon(theirs.start)
        ours.start()
        return ours


class MemoryListener(Listener):
    """A name in a hub."""

    def __init__(
        self,
        address: Address,
        accept: Callable[[], StreamHandler],
        names: dict[str, MemoryListener],
    ) -> None:
        self.accept = accept
        self._address = address
        self._names = names

    @property
    def addresses(self) -> tuple[Address, ...]:
        """The only address of the listener."""
        return (self._address,)

    async def close(self) -> None:
        """Free the name.  Connections live on.  Idempotent."""
        if self._names.get(self._address.host) is self:
            del self._names[self._address.host]


class MemoryConnector(Connector):
    """Connects and listens within one hub."""

    scheme = "mem"

    def __init__(self, hub: MemoryHub) -> None:
        self._hub = hub

    async def listen(
        self, address: Address, accept: Callable[[], StreamHandler]
    ) -> Listener:
        """Listen at a name of the hub; see `Connector.listen`."""
        return self._hub.listen(address, accept)

    async def connect(self, address: Address, handler: StreamHandler) -> Transport:
        """Connect to a name of the hub; see `Connector.connect`."""
        await asyncio.sleep(0)  # a cancellation point, before anything exists
        return self._hub.connect(address, handler)
