"""Lanes: a message is delivered once, when each of its bytes has come once; or never.

Choices open transfers, send chunks of them over three lanes, sound and forged, cut them
anywhere, give transfers up at either end, and move them.  Chunks have 64 bytes here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from asyncrpc.core.wire import chunks
from asyncrpc.core.wire.chunks import Arrival, Arrivals, LaneReader
from asyncrpc.core.wire.frames import Frame, data_prefix
from asyncrpc.errors import RemoteProtocolError
from tests.fuzz.choices import Choices

CHUNK_BYTES = 64
TRANSFERS_MAX = 16


class World:
    """The receiving end of some lanes."""

    def __init__(self) -> None:
        self.arrivals = Arrivals(self.deliver)
        self.lanes = [LaneReader(self.arrivals) for _ in range(3)]
        self.streams = [bytearray() for _ in self.lanes]
        self.totals: list[int] = []
        self.delivered: set[int] = set()
        self.forgotten: set[int] = set()
        self.is_forged = False  # then a header may have become a part of a payload

    def deliver(self, arrival: Arrival) -> None:
        call_id, buffers = arrival.message.call_id, arrival.buffers
        assert call_id not in self.delivered | self.forgotten
        self.delivered.add(call_id)
        whole = b"".join(map(bytes, buffers))
        assert len(whole) == self.totals[call_id - 1]
        assert self.is_forged or not whole.strip(b"x")

    def open(self, choices: Choices) -> None:
        lengths = [choices.below(200) for _ in range(1 + choices.below(3))]
        if not sum(lengths) or len(self.totals) >= TRANSFERS_MAX:
            return
        self.totals.append(sum(lengths))
        message = Frame(2, call_id=len(self.totals))
        buffers = [memoryview(bytearray(length)) for length in lengths]
        self.arrivals.open(message, buffers, sum(lengths))

    def send(self, choices: Choices, lane: int) -> None:
        """Put a chunk on a lane; the bytes are x, so that a gap is seen."""
        serial = 1 + choices.below(TRANSFERS_MAX + 1)
        offset = CHUNK_BYTES * choices.below(12)
        total = self.totals[serial - 1] if serial <= len(self.totals) else 100
        nbytes = max(0, min(CHUNK_BYTES, total - offset))
        self.streams[lane] += data_prefix(serial, offset, nbytes) + b"x" * nbytes

    def forge(self, choices: Choices, lane: int) -> None:
        self.is_forged = True
        header = bytearray(data_prefix(choices.number(), choices.signed(), 64))
        header[choices.below(len(header))] ^= choices.below(256)
        self.streams[lane] += header + b"x" * choices.below(80)

    def feed(self, lane: int, nbytes: int) -> None:
        reader, stream = self.lanes[lane], self.streams[lane]
        while nbytes and stream:
            if reader.waits_for and not reader.proceed():
                return
            memory = reader.get_buffer()
            assert memory.nbytes
            taken = min(memory.nbytes, nbytes, len(stream))
            memory[:taken] = stream[:taken]
            del stream[:taken]
            nbytes -= taken
            reader.advance(taken)

    def give_up(self, choices: Choices) -> None:
        """Give a transfer up, at the other end or at this one."""
        serial = 1 + choices.below(TRANSFERS_MAX)
        if choices.below(2):
            if self.arrivals.forget(2, serial):
                self.forgotten.add(serial)
            return
        if self.arrivals.drop(serial, CHUNK_BYTES * choices.below(12)) is not None:
            self.forgotten.add(serial)

    def step(self, choices: Choices) -> None:
        how, lane = choices.below(8), choices.below(3)
        if how == 0:
            self.open(choices)
        elif how <= 2:
            self.send(choices, lane)
        elif how <= 4:
            self.feed(lane, 1 + choices.below(256))
        elif how == 5:
            self.give_up(choices)
        elif how == 6:
            self.feed(lane, 1 << 20)
        else:
            self.forge(choices, lane)


def check(data: bytes) -> None:
    """Play until the choices are used up, or the peer has broken the protocol."""
    world, choices = World(), Choices(data)
    try:
        while choices:
            world.step(choices)
    except RemoteProtocolError:
        return
    assert len(world.arrivals) <= len(world.totals)


def setting() -> AbstractContextManager[pytest.MonkeyPatch]:
    """Make chunks short, which puts every case within reach."""
    patch = pytest.MonkeyPatch()
    patch.setattr(chunks, "CHUNK_BYTES", CHUNK_BYTES)
    return _Undone(patch)


class _Undone(AbstractContextManager[pytest.MonkeyPatch]):
    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._patch = patch

    def __exit__(self, *_exc: object) -> None:
        self._patch.undo()


def seeds() -> Iterator[bytes]:
    """Give games in which messages arrive."""
    opened = bytes([0, 0, 100, 0, 0, 0, 150, 1, 30])
    chunks = bytes([1, 0, 0, 0, 1, 1, 0, 1, 1, 2, 1, 0, 1, 2, 1, 1, 1, 2, 1, 2])
    yield opened + chunks + bytes([6, 0, 6, 1, 6, 2])
    yield chunks + bytes([3, 0, 9, 3, 1, 9]) + opened + bytes([6, 0, 6, 1, 6, 2])
    yield opened + chunks + bytes([5, 0, 0, 0, 2, 6, 0, 6, 1, 5, 0, 1, 1, 6, 2])
    yield opened + bytes([7, 0, 1, 1, 0, 3, 9, 10, 6, 0])
