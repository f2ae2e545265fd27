"""A sink that keeps everything, and the two ways to feed a reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from asyncrpc.core.wire.chunks import LaneReader
from asyncrpc.core.wire.frames import Flags, FrameKind
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.reader import FrameReader

# What carries a value, and so may have a payload.
WITH_VALUE: Final = (
    *(FrameKind.REQUEST, FrameKind.RESPONSE, FrameKind.ERROR, FrameKind.STREAM_ITEM),
    *(FrameKind.SERVICE, FrameKind.NOTICE),
)


class Message(NamedTuple):
    """A message as it was sent, or given to the sink."""

    kind: int
    flags: int
    call_id: int
    aux: int
    head: bytes
    control: bytes
    buffers: tuple[bytes, ...] = ()


@dataclass
class Recorder:
    """The sink of a reader.

    Attributes:
        messages: what arrived, without the flag of a deferred payload.
        dropped: `(kind, call id)` of the transfers that the peer gave up.
        allocated: sizes of the buffers that the reader asked for.
        buffers: those that it got.
        allocated_max: above this there is no memory.
    """

    messages: list[Message] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)
    allocated: list[int] = field(default_factory=list)
    buffers: list[memoryview] = field(default_factory=list)
    allocated_max: int = 1 << 30

    def on_message(  # noqa: PLR0917  (MessageSink)
        self,
        kind: int,
        flags: int,
        call_id: int,
        aux: int,
        head: bytes,
        control: bytes,
        buffers: list[memoryview],
    ) -> None:
        flags &= ~int(Flags.DEFERRED | Flags.LANES)
        copies = tuple(bytes(buffer) for buffer in buffers)
        self.messages.append(Message(kind, flags, call_id, aux, head, control, copies))

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        self.dropped.append((kind, call_id))

    def allocate(
        self, _kind: int, _call_id: int, lengths: Sequence[int]
    ) -> list[memoryview]:
        """Return memory full of 0xAA: what was not written can be told."""
        if max(lengths) > self.allocated_max:
            raise MemoryError
        self.allocated += lengths
        buffers = [memoryview(bytearray(b"\xaa" * nbytes)) for nbytes in lengths]
        self.buffers += buffers
        return buffers

    def reader(self, limits: MessageLimits | None = None) -> FrameReader:
        """Make a reader that ends here."""
        return FrameReader(self, self.allocate, limits)


def feed(
    reader: FrameReader | LaneReader, stream: bytes, at_most: Sequence[int] = ()
) -> None:
    """Let a stream arrive, cut into pieces of `at_most` bytes each, in turn."""
    rest, turn = memoryview(stream), 0
    while rest:
        buffer = reader.get_buffer()
        assert buffer.nbytes > 0
        nbytes = min(buffer.nbytes, rest.nbytes)
        if at_most:
            nbytes = min(nbytes, at_most[turn % len(at_most)])
        buffer[:nbytes] = rest[:nbytes]
        reader.advance(nbytes)
        rest, turn = rest[nbytes:], turn + 1
