"""The memory that received payloads land in, kept for later payloads.

Every payload has its own memory, which lives as long as a tensor uses it.  When the
last tensor dies, the memory of a large payload is kept in a pool and used again: see
`machine.blocks`.  It is not cleared before: the reader delivers no payload with a gap,
so the old content has been overwritten before any function sees the memory.
`IncomingPayloads` asks for it, for one connection.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrpc.core.payloads.machine.blocks import IdleBlocks, size_class
from asyncrpc.core.payloads.prefaulting import (
    PREFAULTED_BYTES_MIN,
    Prefaulting,
    Told,
)
from asyncrpc.core.serde.encoded import view_memory
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.reader import FrameReader, MessageSink, OnRequest, OnUnasked

# Below this size the C library reuses memory.  Writing 16 MiB: 15 GB/s into kept
# memory, 8 to 9 into fresh huge pages, 1.5 into fresh small ones; 256 MiB: 13, 6 and 2.
POOLED_BYTES_MIN: Final = 1 << 20
# A training step or a burst of requests comes again within this time.
IDLE_S: Final = 5.0

_Block: TypeAlias = npt.NDArray[np.uint8]


def fresh(nbytes: int) -> memoryview:
    """Return fresh memory; numpy asks for huge pages if it is long."""
    return memoryview(np.empty(nbytes, dtype=np.uint8))  # type: ignore[arg-type]


def zeros(nbytes: int) -> memoryview:
    """Return zeros; for long memory the system makes each page when first written."""
    return memoryview(np.zeros(nbytes, dtype=np.uint8))  # type: ignore[arg-type]


class _BlockLease:
    """Dies with the last view of a block that has been given out."""

    __slots__ = ("__weakref__",)


class ReceivePool:
    """The memory of one worker's received payloads."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        limit_bytes: int,
        prefaulting: Prefaulting | None = None,
    ) -> None:
        """Make an empty pool.

        Args:
            loop: the worker's loop; `make` is called on its thread.
            limit_bytes: the limit of unused memory that is kept; 0 keeps no memory.
            prefaulting: makes the pages of long blocks; None: they are made as they are
                written to.
        """
        self._loop = loop
        self._limit_bytes = limit_bytes
        self._prefaulting = prefaulting
        self._idle: IdleBlocks[_Block] = IdleBlocks(limit_bytes)
        # Blocks that finalizers, in any thread, have given back.
        self._returned: deque[_Block] = deque()
        self._noted = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def idle_bytes(self) -> int:
        """Number of bytes of idle memory that are kept."""
        self._take_in()
        return self._idle.idle_bytes

    @property
    def kept_bytes(self) -> int:
        """Number of bytes of idle memory that were kept when the loop last looked.

        Thread safety: from any thread.
        """
        return self._idle.idle_bytes

    def make(self, nbytes: int) -> memoryview:
        """Return writable memory, which returns to the pool when its views are dead.

        Its content is arbitrary.
        """
        if nbytes < POOLED_BYTES_MIN or not self._limit_bytes:
            return fresh(nbytes)
        self._take_in()
        block = self._idle.take(nbytes)
        if block is None:
            block = np.empty(size_class(nbytes), dtype=np.uint8)
            if self._prefaulting is not None and nbytes >= PREFAULTED_BYTES_MIN:
                self._prefaulting.begin(block)
        lease = _BlockLease()
        weakref.finalize(lease, self._give_back, block).atexit = False
        return view_memory(lease, block.ctypes.data, nbytes)

    def is_ready(self, memory: memoryview, tell: Told) -> bool:
        """Return whether memory may be written to now; see `Prefaulting.is_ready`."""
        return self._prefaulting is None or self._prefaulting.is_ready(memory, tell)

    def allow(self, idle_bytes: int) -> None:
        """Lower the limit of unused memory for now; never above the pool's limit."""
        limit_bytes = min(idle_bytes, self._limit_bytes)
        if limit_bytes != self._idle.limit_bytes:
            self._idle.limit_to(limit_bytes)

    def close(self) -> None:
        """Free the kept memory, and keep no memory from now on."""
        self._limit_bytes = 0
        self._idle = IdleBlocks(0)
        if self._prefaulting is not None:
            self._prefaulting.close()
        self._returned.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_back(self, block: _Block) -> None:
        """Queue a block for the loop: a finalizer may run anywhere, at any time."""
        if not self._limit_bytes:  # closed
            return
        self._returned.append(block)
        if not self._noted:
            self._noted = True
            try:
                self._loop.call_soon_threadsafe(self._take_in)
            except RuntimeError:  # the loop is closed
                self._noted = False
                self._returned.clear()

    def _take_in(self) -> None:
        self._noted = False
        while self._returned:
            block = self._returned.popleft()
            if self._prefaulting is not None:
                self._prefaulting.forget(block)
            self._idle.give_back(block, block.nbytes, self._loop.time())
        if self._idle and self._timer is None:
            self._timer = self._loop.call_later(IDLE_S, self._drop_old)

    def _drop_old(self) -> None:
        self._timer = None
        self._idle.drop_older(self._loop.time() - IDLE_S)
        if self._idle:
            at_s = self._idle.oldest_s + IDLE_S
            self._timer = self._loop.call_at(at_s, self._drop_old)


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
