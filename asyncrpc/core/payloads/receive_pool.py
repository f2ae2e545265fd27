"""The memory that received payloads land in, kept for later payloads.

Every payload has its own memory, which lives as long as a tensor uses it.  When the
last tensor dies, the memory of a large payload is kept in a pool and used again: see
`machine.blocks`.  It is not cleared before: the reader delivers no payload with a gap,
so the old content has been overwritten before any function sees the memory.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
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
