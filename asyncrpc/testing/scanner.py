"""Finds the ends of frames in a stream of bytes that another object reads.

It is for objects between two workers: it reads headers and HELLOs, and never values.  A
connection that resumes another continues at the position up to which that was read,
which may be inside a frame; so the frames of the other are kept.  Sans-IO.

Source: docs/reference/wire-protocol.md.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Final, TypeAlias

from asyncrpc.core.wire.frames import (
    ENTRY_BYTES,
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Flags,
    FrameKind,
    Hello,
)
from asyncrpc.core.wire.handshake import PREFACE, PROOF_BYTES

HANDSHAKE_BYTES: Final = PREFACE.size + PROOF_BYTES  # in either direction
_LENGTH_BYTES: Final = 8
_TOKEN: Final = slice(PREFACE.size - 32, PREFACE.size - 24)  # of the dialer's preface
_TOKEN_BIT: Final = 1 << 63
SESSIONS_MAX: Final = 4096  # connections whose positions are remembered
FRAMES_MAX: Final = 1 << 16  # of each; more are never under way

End: TypeAlias = tuple[int, int]  # an offset at which a frame ends, and its kind


class Way(enum.Enum):
    """A direction through a proxy, as seen from the dialer."""

    TO_TARGET = "to the target"
    FROM_TARGET = "from the target"


class FrameScanner:
    """Finds the ends of the frames in one direction of one connection.

    Attributes:
        is_lost: the bytes are not this protocol (but TLS, for example): no more ends
            are found.
        handshake: the first bytes, until they are `HANDSHAKE_BYTES`.
        hello: the HELLO, once it has passed.
        position: bytes that came after the HELLO, including those of resumed ones.
    """

    def __init__(self, conversation: Conversation) -> None:
        self.is_lost = False
        self.handshake = bytearray()
        self.hello: Hello | None = None
        self.position = 0
        self.frames: deque[tuple[int, int, int]] = deque(maxlen=FRAMES_MAX)
        self.header = bytearray()
        self._conversation = conversation
        self._body = bytearray()  # of a HELLO
        self._skip = HANDSHAKE_BYTES  # bytes until the next header
        self._kind = 0  # of the frame whose body is being skipped; 0: the handshake

    def scan(self, chunk: memoryview) -> list[End]:
        """Take the next bytes."""
        ends: list[End] = []
        at = 0
        while at < len(chunk) and not self.is_lost:
            if self._skip:
                count = min(self._skip, len(chunk) - at)
                self._take_body(chunk[at : at + count])
            else:
                count = min(HEADER_BYTES - len(self.header), len(chunk) - at)
                self._take_header(chunk[at : at + count])
            at += count
            if not self._skip and self._kind:
                ends.append((at, self._kind))
                self._kind = 0
        return ends

    def go_on_from(self, other: FrameScanner, position: int) -> None:
        """Continue at the position up to which the resumed connection was read.

        Bytes that it has seen beyond `position` come again.
        """
        self.position = position
        self.frames = other.frames
        while self.frames and self.frames[-1][0] >= position:
            self.frames.pop()
        if self.frames and self.frames[-1][1] > position:
            _, end, self._kind = self.frames[-1]
            self._skip = end - position
        elif other.header:
            begun = other.position - len(other.header)
            self.header += other.header[: max(0, position - begun)]

    def _take_body(self, part: memoryview) -> None:
        self._skip -= len(part)
        if self.hello is not None:
            self.position += len(part)
        elif not self._kind:
            self.handshake += part
        elif self._kind == FrameKind.HELLO:
            self._body += part
            if not self._skip:
                self.hello = Hello.decode(bytes(self._body))
                self._conversation.on_hello(self, self.hello)

    def _take_header(self, part: memoryview) -> None:
        self.header += part
        if self.hello is not None:
            self.position += len(part)
        if len(self.header) < HEADER_BYTES:
            return
        magic, _, kind, flags, head, control, count, _, _, payload = HEADER.unpack(
            self.header
        )
        self.header.clear()
        if magic != MAGIC:
            self.is_lost = True
            return
        self._kind = kind
        self._skip = body_bytes(kind, flags, head + control, count, payload)
        begun = self.position - HEADER_BYTES
        if self.hello is not None:
            self.frames.append((begun, self.position + self._skip, kind))


class Conversation:
    """Both directions of one connection, and the connection that it resumes."""

    def __init__(self, sessions: dict[int, Conversation]) -> None:
        self.scanners = {way: FrameScanner(self) for way in Way}
        self._sessions = sessions
        self._before: Conversation | None = None

    def on_hello(self, scanner: FrameScanner, hello: Hello) -> None:
        """Record a HELLO: it tells how far the other side was read."""
        dialer, acceptor = (self.scanners[way] for way in Way)
        if scanner is dialer:
            if hello.resume:
                self._before = self._sessions.get(hello.resume)
            return
        asked = dialer.hello
        if hello.verdict or asked is None:
            return
        token = asked.resume or _token(dialer.handshake)
        if asked.resume:
            if self._before is None:
                dialer.is_lost = acceptor.is_lost = True
                return
            before = self._before.scanners
            dialer.go_on_from(before[Way.TO_TARGET], hello.received)
            acceptor.go_on_from(before[Way.FROM_TARGET], asked.received)
            self._before = None
        self._sessions.pop(token, None)
        self._sessions[token] = self
        if len(self._sessions) > SESSIONS_MAX:
            del self._sessions[next(iter(self._sessions))]


def _token(handshake: bytearray) -> int:
    return int.from_bytes(handshake[_TOKEN], "little") | _TOKEN_BIT


def body_bytes(kind: int, flags: int, lead: int, count: int, payload: int) -> int:
    """Return how many bytes follow a header."""
    if kind == FrameKind.DATA:
        return payload
    entry = ENTRY_BYTES if flags & Flags.PLACED else _LENGTH_BYTES
    inline = 0 if flags & Flags.DEFERRED else payload
    return lead + count * entry + inline
