"""The outbox: in which order the bytes of one connection are written.

Messages go at once, in order.  The payload of a large one waits here and leaves in
chunks, one per transfer in turn, whenever the transport has room: so a small message
waits for the chunks already handed to the transport and for nothing else, and a
transfer can be given up midway.

Sans-IO: `message` and `next_chunk` return what to write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from asyncrpc.wire.frames import (
    CHUNK_BYTES,
    INLINE_BYTES_MAX,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)

# Below this many bytes one joined write beats a vectored one.
JOIN_BYTES_MAX = 8 << 10


class _Outgoing:
    """A deferred payload on its way out."""

    __slots__ = ("buffers", "call_id", "kind", "offset", "on_sent", "opening", "within")

    def __init__(
        self,
        kind: int,
        call_id: int,
        opening: bytes,
        buffers: Sequence[memoryview],
        on_sent: Callable[[], None] | None,
    ) -> None:
        self.kind = kind
        self.call_id = call_id
        self.opening = opening  # the message itself, until it has been sent
        self.buffers = deque(buffer for buffer in buffers if buffer.nbytes)
        self.within = 0  # of the first buffer
        self.offset = 0  # in the whole payload
        self.on_sent = on_sent

    def take(self, limit: int) -> list[memoryview]:
        """Cut off the next `limit` bytes, or what is left."""
        pieces: list[memoryview] = []
        while limit and self.buffers:
            first = self.buffers[0]
            piece = first[self.within : self.within + limit]
            pieces.append(piece)
            limit -= piece.nbytes
            self.within += piece.nbytes
            self.offset += piece.nbytes
            if self.within == first.nbytes:
                self.buffers.popleft()
                self.within = 0
        return pieces


class Outbox:
    """What one connection has still to send."""

    def __init__(self) -> None:
        self._turn: deque[tuple[int, int]] = deque()  # transfers, the next one first
        self._transfers: dict[tuple[int, int], deque[_Outgoing]] = {}

    def __bool__(self) -> bool:
        return bool(self._turn)

    def message(
        self,
        kind: int,
        call_id: int,
        *,
        flags: int = 0,
        aux: int = 0,
        head: bytes = b"",
        control: bytes = b"",
        buffers: Sequence[memoryview] = (),
        on_sent: Callable[[], None] | None = None,
    ) -> Sequence[bytes | memoryview]:
        """Add a message; return what to write at once, perhaps nothing.

        Args:
            kind: its kind.
            call_id: the call it belongs to.
            flags: as in the header, without DEFERRED.
            aux: as in the header.
            head: routing.
            control: the value.
            buffers: its payload; not to be written to until `on_sent`.
            on_sent: called when the last byte of the message has been taken; at once
                for one that is returned here whole.  It must not send: what it sent
                would be written first.
        """
        if not buffers:
            whole = prefix(
                kind, call_id, flags=flags, aux=aux, head=head, control=control
            )
            if on_sent is not None:
                on_sent()
            return (whole,)
        lengths = [buffer.nbytes for buffer in buffers]
        total = sum(lengths)
        deferred = total > INLINE_BYTES_MAX
        opening = prefix(
            kind,
            call_id,
            flags=flags | Flags.DEFERRED if deferred else flags,
            aux=aux,
            head=head,
            control=control,
            lengths=lengths,
            payload_bytes=total,
        )
        if deferred:
            return self._defer(_Outgoing(kind, call_id, opening, buffers, on_sent))
        if on_sent is not None:
            on_sent()
        if total <= JOIN_BYTES_MAX:
            return (b"".join((opening, *buffers)),)
        return (opening, *buffers)

    def _defer(self, outgoing: _Outgoing) -> Sequence[bytes]:
        """Queue a payload; its message goes at once unless one of its key is ahead."""
        key = (outgoing.kind, outgoing.call_id)
        queue = self._transfers.setdefault(key, deque())
        queue.append(outgoing)
        if len(queue) > 1:
            return ()
        self._turn.append(key)
        opening, outgoing.opening = outgoing.opening, b""
        return (opening,)

    def next_chunk(self) -> list[bytes | memoryview]:
        """Return the next chunk to write, with its header; empty if there is none."""
        if not self._turn:
            return []
        key = self._turn.popleft()
        queue = self._transfers[key]
        outgoing = queue[0]
        chunk: list[bytes | memoryview] = []
        if outgoing.opening:
            chunk.append(outgoing.opening)
            outgoing.opening = b""
        offset = outgoing.offset
        pieces = outgoing.take(CHUNK_BYTES)
        nbytes = outgoing.offset - offset
        chunk.append(data_prefix(outgoing.kind, outgoing.call_id, offset, nbytes))
        chunk += pieces
        is_last = not outgoing.buffers
        if is_last:
            queue.popleft()
        if queue:
            self._turn.append(key)
        else:
            del self._transfers[key]
        if is_last and outgoing.on_sent is not None:
            outgoing.on_sent()
        return chunk

    def drop(self, kind: int, call_id: int) -> Sequence[bytes] | None:
        """Give up the transfers of a message.

        Returns:
            What tells the peer; None if there was no such transfer.
        """
        queue = self._transfers.pop((kind, call_id), None)
        if queue is None:
            return None
        self._turn.remove((kind, call_id))
        begun = not queue[0].opening
        for outgoing in queue:
            if outgoing.on_sent is not None:
                outgoing.on_sent()
        return (prefix(FrameKind.DROP, call_id, flags=kind),) if begun else ()

    def clear(self) -> None:
        """Forget everything: the connection is gone."""
        transfers, self._transfers = self._transfers, {}
        self._turn.clear()
        for queue in transfers.values():
            for outgoing in queue:
                if outgoing.on_sent is not None:
                    outgoing.on_sent()
