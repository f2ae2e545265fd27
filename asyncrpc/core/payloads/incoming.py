"""The payloads that one connection receives: their memory, and giving them up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.payloads.receive_pool import zeros
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.reader import FrameReader, MessageSink, OnRequest, OnUnasked

_RESPONSE: Final = int(FrameKind.RESPONSE)


class IncomingPayloads:
    """The frame reader of one connection, and the memory of payloads.

    Attributes:
        claims: by call, the memory for the only buffer of the call's response.
    """

    __slots__ = ("_make", "claims", "frames")

    def __init__(
        self,
        sink: MessageSink,
        limits: MessageLimits,
        make: Callable[[int], memoryview],
    ) -> None:
        self._make = make
        self.claims: dict[int, memoryview] = {}
        self.frames = FrameReader(sink, self.allocate, limits)
        self.frames.is_exact = True  # a lane's first chunk may follow the HELLO

    def allocate(
        self, kind: int, call_id: int, lengths: Sequence[int]
    ) -> list[memoryview]:
        """Return the buffers of a message: the caller's own memory where it fits."""
        if self.claims and kind == _RESPONSE and len(lengths) == 1:
            claimed = self.claims.get(call_id)
            if claimed is not None and claimed.nbytes == lengths[0]:
                return [claimed]
        make = self._make
        return [make(nbytes) for nbytes in lengths]

    def claim(self, call_id: int, memory: memoryview) -> None:
        """Let the only buffer of a call's response land in `memory`, if it fits."""
        self.claims[call_id] = memory

    def release_claim(self, call_id: int) -> None:
        """End a claim: from now on no byte is written to its memory."""
        if self.claims.pop(call_id, None) is not None:
            self.frames.arrivals.move(_RESPONSE, call_id, zeros)

    def forget(self, kind: int, call_id: int) -> bytes | None:
        """Do not deliver a message whose payload is arriving."""
        return self.frames.arrivals.forget(kind, call_id)

    def rest(self) -> None:
        """Give back memory: nothing comes for now; see `FrameReader.rest`."""
        self.frames.rest()

    def watch_requests(self, begun: OnRequest, unasked: OnUnasked) -> None:
        """Call `begun` for large requests, `unasked` for other large messages.

        See `FrameReader`.
        """
        self.frames.on_request, self.frames.on_unasked = begun, unasked

    def stand_in(self, unreadable: Callable[[str], bytes]) -> None:
        """Set the maker of unreadable messages; see `FrameReader.unreadable`."""
        self.frames.unreadable = unreadable
