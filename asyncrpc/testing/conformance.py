"""The contract of transports, as tests: derive a class and name a connector.

    class TestMyTransport(TransportConformance):
        def connector(self) -> Connector:
            return MyConnector()

        def address(self) -> Address:
            return Address("tcp", "127.0.0.1")

The methods are coroutines: run them with pytest-asyncio or with `asyncio.run`.  They
wait for events and never for a time, apart from a limit that only a failure reaches.

Source: the contract in `asyncrpc.core.transport.abc`.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Final

from asyncrpc.core.transport.abc import Buffer, Connector, Listener, Transport
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import WaterMarks
from asyncrpc.errors import ConnectError, ConnectionLostError, TransportError

LIMIT_S: Final = 60.0  # for one wait
# One, just under a page, just over the landing buffer, a whole water mark, and many.
SIZES_BYTES: Final = (1, 4095, 65_537, 1 << 20, (32 << 20) + 7)
MANY: Final = 50
_CHUNK: Final = bytes(64 << 10)


class Recorder:
    """A handler that records all events, and lets a test wait for them.

    Attributes:
        received: all bytes, in the order in which they came.
        events: names of the handler's methods, except the two that move bytes.
        error: the argument of `connection_lost`.
    """

    transport: Transport

    def __init__(self, *, landing_bytes: int = 65_537) -> None:
        self.received = bytearray()
        self.events: list[str] = []
        self.error: TransportError | None = None
        self._landing = bytearray(landing_bytes)
        self._changed = asyncio.Event()

    @property
    def lost(self) -> int:
        """How often the connection was lost."""
        return self.events.count("connection_lost")

    def connection_made(self, transport: Transport) -> None:
        """Keep the transport."""
        self.transport = transport
        self._note("connection_made")

    def get_buffer(self, sizehint: int, /) -> bytearray:
        """Return a buffer of an odd size, the same each time."""
        return self._landing

    def buffer_updated(self, nbytes: int, /) -> None:
        """Keep the bytes."""
        self.received += memoryview(self._landing)[:nbytes]
        self._changed.set()

    def connection_lost(self, error: TransportError | None, /) -> None:
        """Keep the error."""
        self.error = error
        self._note("connection_lost")

    def pause_writing(self) -> None:
        """Keep the event."""
        self._note("pause_writing")

    def resume_writing(self) -> None:
        """Keep the event."""
        self._note("resume_writing")

    async def until(
        self, holds: Callable[[Recorder], bool], *, limit_s: float = LIMIT_S
    ) -> None:
        """Wait until `holds(self)`."""
        async with asyncio.timeout(limit_s):
            while not holds(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_received(self, nbytes: int) -> None:
        """Wait until `nbytes` bytes have come in all."""
        await self.until(lambda me: len(me.received) >= nbytes)

    async def until_lost(self, *, limit_s: float = LIMIT_S) -> None:
        """Wait until the connection has ended."""
        await self.until(lambda me: me.lost > 0, limit_s=limit_s)

    def _note(self, event: str) -> None:
        self.events.append(event)
        self._changed.set()


@dataclass(frozen=True, slots=True)
class Pair:
    """The two ends of one connection."""

    near: Recorder
    far: Recorder


class Acceptor:
    """A listener's side: makes recorders and keeps them."""

    def __init__(self) -> None:
        self.accepted: list[Recorder] = []
        self._more = asyncio.Event()

    def __call__(self) -> Recorder:
        """Make the handler of a new connection."""
        recorder = Recorder()
        self.accepted.append(recorder)
        self._more.set()
        return recorder

    async def connected(self, count: int) -> None:
        """Wait until `count` connections have been made."""
        async with asyncio.timeout(LIMIT_S):
            while len(self.accepted) < count:
                self._more.clear()
                await self._more.wait()
        for recorder in self.accepted[:count]:
            await recorder.until(lambda me: bool(me.events))


class TransportConformance(ABC):
    """The tests.  A subclass gives the connector and an address to listen at."""

    @abstractmethod
    def connector(self) -> Connector:
        """Return the connector under test; the same in all calls of one test."""

    @abstractmethod
    def address(self) -> Address:
        """Return a free address to listen at, the same in all calls of one test."""

    def dialler(self) -> Connector:
        """Return the connector that dials, if another one listens."""
        return self.connector()

    # --- bytes ---

    async def test_bytes_arrive_in_order_and_whole(self) -> None:
        """Whatever their number and however cut, in both directions at once."""
        for size in SIZES_BYTES:
            payload = random.Random(size).randbytes(size)  # noqa: S311  (a pattern)
            async with self.pair() as pair:
                pair.near.transport.send(list(_odd_cuts(payload)))
                pair.far.transport.send([payload])
                await pair.far.until_received(size)
                await pair.near.until_received(size)
                assert pair.far.received == payload
                assert pair.near.received == payload

    async def test_sends_keep_their_order(self) -> None:
        """Many small sends of several buffers arrive as if they had been one."""
        parts: list[list[Buffer]]
        parts = [[b"%d:" % i, b"", bytearray(b"x" * (i % 7))] for i in range(2000)]
        expected = b"".join(itertools.chain.from_iterable(parts))
        async with self.pair() as pair:
            for part in parts:
                pair.near.transport.send(part)
            await pair.far.until_received(len(expected))
            assert pair.far.received == expected

    async def test_a_queue_drains_into_its_own_buffers(self) -> None:
        """Queued bytes are counted; the count is zero when the peer has them all."""
        payload = bytes(8 << 20)
        async with self.pair() as pair:
            pair.near.transport.send([payload])
            assert 0 <= pair.near.transport.queued_bytes <= len(payload)
            await pair.far.until_received(len(payload))
            assert pair.near.transport.queued_bytes == 0

    # --- flow control ---

    async def test_pause_reading_stops_delivery(self) -> None:
        """A paused handler gets no byte; a resumed one gets them all."""
        async with self.pair() as pair:
            pair.near.transport.send([b"before, "])
            await pair.far.until_received(8)  # so no handshake of the channel is left
            pair.far.transport.pause_reading()
            pair.far.transport.pause_reading()
            pair.near.transport.send([b"while paused"])
            pair.far.transport.send([b"other way"])
            await pair.near.until_received(9)  # a round trip's worth of time
            assert pair.far.received == b"before, "
            pair.far.transport.resume_reading()
            pair.far.transport.resume_reading()
            await pair.far.until_received(20)
            assert pair.far.received == b"before, while paused"

    async def test_writing_pauses_and_resumes_at_the_marks(self) -> None:
        """One pause on the way up, one resume on the way down."""
        async with self.pair() as pair:
            pair.far.transport.pause_reading()
            sent = _fill(pair.near)
            assert pair.near.events == ["connection_made", "pause_writing"]
            pair.far.transport.resume_reading()
            await pair.far.until_received(sent)
            await pair.near.until(lambda me: "resume_writing" in me.events)
            expected = ["connection_made", "pause_writing", "resume_writing"]
            assert pair.near.events == expected

    async def test_other_marks_hold_from_then_on(self) -> None:
        """A mark of 0 holds back whatever has not been taken at once."""
        async with self.pair() as pair:
            pair.near.transport.use_marks(WaterMarks(high_bytes=0, low_bytes=0))
            pair.far.transport.pause_reading()
            sent = 0
            while "pause_writing" not in pair.near.events:
                pair.near.transport.send([_CHUNK])
                sent += len(_CHUNK)
            assert 0 < pair.near.transport.queued_bytes <= len(_CHUNK)
            pair.far.transport.resume_reading()
            await pair.far.until_received(sent)
            await pair.near.until(lambda me: "resume_writing" in me.events)
            assert not pair.near.transport.queued_bytes

    # --- the end ---

    async def test_close_delivers_what_is_queued(self) -> None:
        """With megabytes in flight both ways, and the peer in no hurry."""
        payload = random.Random(1).randbytes(6 << 20)  # noqa: S311  (a pattern)
        async with self.pair() as pair:
            pair.far.transport.send([_CHUNK])  # unread here when we close
            pair.near.transport.send([payload])
            pair.near.transport.close()
            pair.near.transport.send([b"dropped"])
            pair.near.transport.close()
            await pair.far.until_lost()
            await pair.near.until_lost()
            assert pair.far.received == payload
            assert (pair.near.error, pair.far.error) == (None, None)

    async def test_abort_drops_what_is_queued(self) -> None:
        """The peer may have the start, never the end, and learns it once."""
        async with self.pair() as pair:
            pair.far.transport.pause_reading()
            sent = _fill(pair.near)
            pair.near.transport.abort()
            pair.near.transport.abort()
            pair.near.transport.send([b"dropped"])
            pair.far.transport.resume_reading()
            await pair.near.until_lost()
            await pair.far.until_lost()
            assert pair.near.error is None
            assert len(pair.far.received) < sent
            assert isinstance(pair.far.error, ConnectionLostError | None)

    async def test_the_end_is_told_once_however_it_came(self) -> None:
        """Both close, both abort, one of each, and again afterwards."""
        for ours, theirs in itertools.product(("close", "abort"), repeat=2):
            async with self.pair() as pair:
                pair.near.transport.send([b"near"])
                getattr(pair.near.transport, ours)()
                getattr(pair.far.transport, theirs)()
                await pair.near.until_lost()
                await pair.far.until_lost()
                pair.near.transport.close()
                pair.far.transport.abort()
                pair.near.transport.send([b"late"])
                pair.near.transport.pause_reading()
                pair.near.transport.resume_reading()
                assert pair.near.transport.queued_bytes == 0
            assert (pair.near.lost, pair.far.lost) == (1, 1)

    async def test_nothing_is_delivered_after_close(self) -> None:
        """A handler that has closed gets no more bytes."""
        async with self.pair() as pair:
            pair.far.transport.send([b"too late"])
            pair.near.transport.close()
            await pair.near.until_lost()
            assert not pair.near.received

    # --- addresses ---

    async def test_a_published_address_can_be_reached(self) -> None:
        """Also if the system chose the port."""
        acceptor = Acceptor()
        async with self.listening(acceptor) as listener:
            assert listener.addresses
            for count, address in enumerate(listener.addresses, start=1):
                near = Recorder()
                transport = await self.dialler().connect(address, near)
                assert near.events == ["connection_made"]
                assert transport is near.transport
                assert transport.scheme == address.scheme
                assert transport.remote
                await acceptor.connected(count)
                await _end(Pair(near, acceptor.accepted[-1]))

    async def test_an_address_in_use_is_an_error_and_free_after_close(self) -> None:
        """The second to listen is refused; once the first has closed, it is not."""
        async with self.listening(Acceptor()) as listener:
            address = listener.addresses[0]
            with contextlib.suppress(TransportError):
                second = await self.connector().listen(address, Recorder)
                await second.close()
                raise AssertionError(f"two listeners share {address}")
            await listener.close()
            again = await self.connector().listen(address, Recorder)
            await again.close()

    async def test_connections_outlive_their_listener(self) -> None:
        """Closing a listener stops new connections only."""
        acceptor, near = Acceptor(), Recorder()
        async with self.listening(acceptor) as listener:
            await self.dialler().connect(listener.addresses[0], near)
            await acceptor.connected(1)
        near.transport.send([b"still here"])
        await acceptor.accepted[0].until_received(10)
        await _end(Pair(near, acceptor.accepted[0]))

    async def test_nobody_listens(self) -> None:
        """Connecting there is a ConnectError, and the handler hears nothing."""
        async with self.listening(Acceptor()) as listener:
            gone = listener.addresses[0]
        recorder, refusal = Recorder(), ""
        try:
            await self.dialler().connect(gone, recorder)
        except ConnectError as error:
            refusal = str(error)
        assert gone.host in refusal, f"connected to {gone}, where nobody listens"
        assert recorder.events == []

    async def test_a_cancelled_connect_leaves_nothing(self) -> None:
        """Whatever turn of the loop the cancellation falls into."""
        acceptor = Acceptor()
        async with self.listening(acceptor) as listener:
            for turns in range(6):
                await self._connect_and_cancel(listener.addresses[0], turns)
            for far in acceptor.accepted:
                await far.until(
                    lambda me: me.lost == me.events.count("connection_made")
                )

    async def test_many_connections(self) -> None:
        """Fifty at once, each with its own bytes."""
        acceptor = Acceptor()
        async with self.listening(acceptor) as listener:
            nears = [Recorder() for _ in range(MANY)]
            address = listener.addresses[0]
            await asyncio.gather(
                *(self.dialler().connect(address, near) for near in nears)
            )
            for index, near in enumerate(nears):
                near.transport.send([b"%03d" % index])
            await acceptor.connected(MANY)
            for far in acceptor.accepted:
                await far.until_received(3)
            came = sorted(bytes(far.received) for far in acceptor.accepted)
            assert came == [b"%03d" % index for index in range(MANY)]
            for near in nears:
                near.transport.close()
            for recorder in (*nears, *acceptor.accepted):
                await recorder.until_lost()

    # --- plumbing ---

    @contextlib.asynccontextmanager
    async def listening(self, acceptor: Acceptor) -> AsyncIterator[Listener]:
        """Listen at `address` while the block runs."""
        listener = await self.connector().listen(self.address(), acceptor)
        try:
            yield listener
        finally:
            await listener.close()

    @contextlib.asynccontextmanager
    async def pair(self) -> AsyncIterator[Pair]:
        """Make one connection, which ends with the block."""
        acceptor, near = Acceptor(), Recorder()
        async with self.listening(acceptor) as listener:
            await self.dialler().connect(listener.addresses[0], near)
            await acceptor.connected(1)
        pair = Pair(near, acceptor.accepted[0])
        try:
            yield pair
        finally:
            await _end(pair)

    async def _connect_and_cancel(self, address: Address, turns: int) -> None:
        near = Recorder()
        connecting = asyncio.create_task(self.dialler().connect(address, near))
        for _ in range(turns):
            await asyncio.sleep(0)
        connecting.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            (await connecting).abort()
        connections = near.events.count("connection_made")
        await near.until(lambda me: me.lost == connections)


async def _end(pair: Pair) -> None:
    for recorder in (pair.near, pair.far):
        recorder.transport.abort()
    for recorder in (pair.near, pair.far):
        await recorder.until_lost()


def _fill(recorder: Recorder) -> int:
    """Send until the handler must hold back; return the bytes sent."""
    sent = 0
    while "pause_writing" not in recorder.events:
        recorder.transport.send([_CHUNK])
        sent += len(_CHUNK)
        assert sent < 1 << 30, "a gibibyte is queued and pause_writing has not run"
    return sent


def _odd_cuts(payload: bytes) -> Iterator[Buffer]:
    """Cut `payload` into pieces of growing prime-like sizes, some of them empty."""
    view, start, size = memoryview(payload), 0, 1
    while start < len(payload):
        yield view[start : start + size]
        yield b""
        start, size = start + size, size * 3 + 2
