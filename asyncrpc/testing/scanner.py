"""Where frames end in a stream of bytes that somebody else reads.

For what stands between two workers: it looks at headers, and never at values.  Sans-IO.

Source: docs/reference/wire-protocol.md.
"""

from __future__ import annotations

import enum
from typing import Final, TypeAlias

from asyncrpc.wire.frames import (
    HEADER,
    HEADER_BYTES,
    MAGIC,
    Flags,
    FrameKind,
)
from asyncrpc.wire.handshake import PREFACE, PROOF_BYTES
from asyncrpc.wire.placed import ENTRY_BYTES

HANDSHAKE_BYTES: Final = PREFACE.size + PROOF_BYTES  # in either direction
_LENGTH_BYTES: Final = 8

End: TypeAlias = tuple[int, int]  # an offset at which a frame ends, and its kind


class Way(enum.Enum):
    """A direction through a proxy: seen from who dialed, there and back."""

    TO_TARGET = "to the target"
    FROM_TARGET = "from the target"


class FrameScanner:
    """Finds the ends of the frames in one direction of one connection.

    Attributes:
        is_lost: what came is not this protocol (TLS, say): no more ends are found.
    """

    def __init__(self) -> None:
        self.is_lost = False
        self._skip = HANDSHAKE_BYTES  # bytes until the next header
        self._header = bytearray()
        self._kind = 0  # of the frame whose body is being skipped; 0: the handshake

    def scan(self, chunk: memoryview) -> list[End]:
        """Take the next bytes.

        Returns:
            For each frame that ends in them: the offset of its end, and its kind.
        """
        found: list[End] = []
        at = 0
        while at < len(chunk) and not self.is_lost:
            if self._skip:
                taken = min(self._skip, len(chunk) - at)
                self._skip -= taken
                at += taken
                self._note_end(at, found)
                continue
            missing = HEADER_BYTES - len(self._header)
            self._header += chunk[at : at + missing]
            at += min(missing, len(chunk) - at)
            if len(self._header) == HEADER_BYTES:
                self._read_header()
                self._note_end(at, found)
        return found

    def _note_end(self, at: int, found: list[End]) -> None:
        if not self._skip and self._kind:
            found.append((at, self._kind))
            self._kind = 0

    def _read_header(self) -> None:
        magic, _, kind, flags, head, control, count, _, _, payload = HEADER.unpack(
            self._header
        )
        self._header.clear()
        if magic != MAGIC:
            self.is_lost = True
            return
        self._kind = kind
        self._skip = body_bytes(kind, flags, head + control, count, payload)


def body_bytes(kind: int, flags: int, lead: int, count: int, payload: int) -> int:
    """Return how many bytes follow a header.

    Args:
        kind: of the frame.
        flags: of the frame.
        lead: bytes of head and control part.
        count: of buffers.
        payload: bytes of the payload, wherever they come.
    """
    if kind == FrameKind.DATA:
        return payload
    if kind == FrameKind.DROP:
        return lead
    entry = ENTRY_BYTES if flags & Flags.PLACED else _LENGTH_BYTES
    inline = 0 if flags & Flags.DEFERRED else payload
    return lead + count * entry + inline
