"""What a program and its host server say to one another, over the server's stdio.

    program -> server       StartWorker, SignalWorker, StillHere
    server -> program       HostHello, then Begun, Ready, StartFailed, Ended, Printed

A frame is its length, four bytes, big-endian, and one msgpack array: the name of the
message, and its fields.  Before its first frame the server writes `MARKER`: what a
login shell has printed before is skipped.  A server that breaks this protocol is given
up, with its host.  A server that hears nothing for `SILENCE_S` ends: a network that is
cut without notice leaves no workers behind.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import msgpack

MARKER: Final = b"\n--- asyncrpc host server 1 ---\n"
NOISE_BYTES_MAX: Final = 1 << 16  # before the marker
FRAME_BYTES_MAX: Final = 1 << 18  # an order of a worker has half of it, lines a quarter
ALIVE_S: Final = 60.0  # how often the program tells that it is there
SILENCE_S: Final = 300.0  # of a program that is stopped, or of its network
_LENGTH_BYTES: Final = 4
_TEXT_MAX: Final = 1 << 15
_READ_BYTES: Final = 1 << 16


class BrokenStreamError(Exception):
    """The other side broke the protocol, or the stream has ended."""


@dataclass(frozen=True, slots=True)
class StartWorker:
    """Start a process; `order` is a pickled `ProcessOrder`."""

    number: int
    order: bytes


@dataclass(frozen=True, slots=True)
class SignalWorker:
    """Send a process a signal."""

    number: int
    signal: int


@dataclass(frozen=True, slots=True)
class StillHere:
    """The program is there."""


@dataclass(frozen=True, slots=True)
class HostHello:
    """The server runs.

    Attributes:
        torch: its version, without what follows a plus sign.
    """

    asyncrpc: str
    torch: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A process runs."""

    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker can be called; its addresses are parted by spaces."""

    number: int
    incarnation: int
    addresses: str


@dataclass(frozen=True, slots=True)
class StartFailed:
    """A worker did not start."""

    number: int
    summary: str
    traceback: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A process has ended, or could not be started."""

    number: int
    why: str


@dataclass(frozen=True, slots=True)
class Printed:
    """Whole lines that a worker has printed to `"stdout"` or `"stderr"`."""

    name: str
    stream: str
    lines: bytes


_FromProgram: TypeAlias = StartWorker | SignalWorker | StillHere
_FromServer: TypeAlias = HostHello | Begun | Ready | StartFailed | Ended | Printed
Frame: TypeAlias = _FromProgram | _FromServer
_KINDS: Final[Mapping[str, type[Frame]]] = {
    kind.__name__: kind
    for kind in (
        *(StartWorker, SignalWorker, StillHere, HostHello),
        *(Begun, Ready, StartFailed, Ended, Printed),
    )
}
_TYPES: Final = {"int": int, "str": str, "bytes": bytes}


def encode(frame: Frame) -> bytes:
    """Return a frame with its length; texts that are too long are cut."""
    values = [getattr(frame, field.name) for field in dataclasses.fields(frame)]
    values = [
        value[-_TEXT_MAX:] if isinstance(value, str) else value for value in values
    ]
    packed: bytes = msgpack.packb([type(frame).__name__, *values])
    return len(packed).to_bytes(_LENGTH_BYTES, "big") + packed


def decode(packed: bytes) -> Frame:
    """Return the frame in these bytes; BrokenStreamError: it is not one."""
    try:
        name, *values = msgpack.unpackb(packed)
        kind = _KINDS[name]
        wanted = [_TYPES[str(field.type)] for field in dataclasses.fields(kind)]
        if [type(value) for value in values] == wanted:
            return kind(*values)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException):
        pass
    raise BrokenStreamError(f"{packed[:60]!r} is no frame of a host server")


class HostFrames:
    """Cuts a stream into frames."""

    def __init__(self, read: Callable[[int], Awaitable[bytes]]) -> None:
        """Read with a function that returns up to so many bytes; none: the end."""
        self._read = read
        self._unread = b""

    async def skip_to_marker(self) -> None:
        """Skip what comes before the first frame.

        BrokenStreamError: the stream has ended, or too much came.
        """
        while MARKER not in self._unread:
            if len(self._unread) > NOISE_BYTES_MAX:
                raise BrokenStreamError("it prints something else without an end")
            await self._read_more()
        self._unread = self._unread.partition(MARKER)[2]

    async def frame(self) -> Frame:
        """Return the next frame.

        BrokenStreamError: the stream has ended, or this is no frame.
        """
        length = int.from_bytes(await self._take(_LENGTH_BYTES), "big")
        if length > FRAME_BYTES_MAX:
            raise BrokenStreamError(f"a frame would have {length} bytes")
        return decode(await self._take(length))

    async def _take(self, size: int) -> bytes:
        while len(self._unread) < size:
            await self._read_more()
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    async def _read_more(self) -> None:
        received: Any = await self._read(_READ_BYTES)
        if not received:
            raise BrokenStreamError("its output has ended")
        self._unread += received
