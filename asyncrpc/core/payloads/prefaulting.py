"""Makes the pages of fresh memory in a thread, ahead of the payload that lands in it.

The first write to a page lets the kernel find and clear it.  For a huge page that takes
0.2 ms, and in a virtual machine whose host must find the memory too up to 10 ms.  On
the event loop every call of the worker would wait meanwhile, once for each 2 MiB of
the payload.

A reader asks whether memory is ready before it reads into it, and if not, lets its
connection rest until it is told.  It never waits for a thread that has not begun: all
threads may be busy with functions that wait for this very payload.

Pages are made only for what comes next, at most as much as has come: a peer that
announces a payload, and does not send it, takes no memory.

Source: madvise(2), MADV_POPULATE_WRITE.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from asyncrpc.core.loop.threads import Submit
from asyncrpc.core.payloads.mover import address_of
from asyncrpc.core.shm.slab import populate
from asyncrpc.errors import ClosedError, RejectedError

# Shorter memory has small pages, which take some microseconds each.
PREFAULTED_BYTES_MIN: Final = 4 << 20
# A huge page: longer calls would keep other threads from mapping memory.
STEP_BYTES: Final = 2 << 20
# At 4 GB/s it arrives in 8 ms; the kernel makes it in 3.
AHEAD_BYTES_MAX: Final = 32 << 20

Told: TypeAlias = Callable[[], None]


class _FreshBlock:
    """A block of which not all pages have been made.

    Attributes:
        memory: the block, which is kept alive.
        first: address of its first byte.
        end: address after its last byte.
        at: address up to which it has pages.
        wanted: address up to which it should have them.
        is_queued: whether the thread has pages to make.
        is_in_thread: whether it makes them soon: then `at` is worth waiting for.
    """

    __slots__ = ("at", "end", "first", "is_in_thread", "is_queued", "memory", "wanted")

    def __init__(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory = memory
        self.first = self.at = self.wanted = memory.ctypes.data
        self.end = self.first + memory.nbytes
        self.is_queued = self.is_in_thread = False

    def want(self, until: int) -> None:
        """Want pages for the bytes up to `until`, and for some that follow."""
        ahead = min(max(until - self.first, STEP_BYTES), AHEAD_BYTES_MAX)
        self.wanted = min(max(self.wanted, until + ahead), self.end)

    @property
    def is_over(self) -> bool:
        """Whether all pages have been made."""
        return self.at >= self.end


class Prefaulting:
    """The fresh memory of one worker's received payloads, until it has pages.

    One thread makes pages at a time: the kernel does not let go of its core meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, submit: Submit) -> None:
        """Begin without memory.

        Args:
            loop: the worker's loop; all methods are called on its thread.
        """
        self._loop = loop
        self._submit = submit
        self._blocks: list[_FreshBlock] = []
        self._waiting: dict[Told, None] = {}  # in their order
        self._is_closed = False
        self._lock = threading.Lock()  # of what follows
        self._queue: deque[_FreshBlock] = deque()
        self._is_submitted = False
        self._has_begun = False

    def begin(self, memory: npt.NDArray[np.uint8]) -> None:
        """Take fresh memory, whose pages are made as its payload comes."""
        self._blocks.append(_FreshBlock(memory))

    def forget(self, memory: npt.NDArray[np.uint8]) -> None:
        """Make no more pages of memory that is not used any more."""
        self._blocks = [block for block in self._blocks if block.memory is not memory]

    def is_ready(self, memory: memoryview, tell: Told) -> bool:
        """Return whether memory may be written to without a wait for its pages."""
        if not self._blocks:
            return True
        first = address_of(memory)
        for block in self._blocks:
            if block.first <= first < block.end:
                return self._is_ready(block, first, first + memory.nbytes, tell)
        return True

    def _is_ready(self, block: _FreshBlock, first: int, end: int, tell: Told) -> bool:
        if first > block.at + AHEAD_BYTES_MAX:
            return True  # far from all that has come: it makes its own pages
        with self._lock:
            block.want(end)
            is_due = block.wanted > block.at and not block.is_queued
        if is_due:
            self._queue_up(block)
        if end <= block.at or not block.is_in_thread:
            return True
        self._waiting[tell] = None
        return False

    def _queue_up(self, block: _FreshBlock) -> None:
        """Let the thread make the pages that a block wants."""
        with self._lock:
            block.is_queued = True
            block.is_in_thread = self._has_begun  # then the thread will get to it
            self._queue.append(block)
            is_submitted, self._is_submitted = self._is_submitted, True
        if not is_submitted:
            try:
                self._submit(self._make_all_pages, self._on_end)
            except RejectedError:  # no thread: pages are made as they are written to
                self._queue.clear()
                self._blocks.clear()
                self._is_submitted = False

    def close(self) -> None:
        """Make no more pages; whatever waits goes on."""
        self._is_closed = True
        self._blocks.clear()
        self._tell()

    def _make_all_pages(self) -> None:
        """Make the pages that all blocks want, in a thread."""
        with self._lock:
            self._has_begun = True
            for block in self._queue:
                block.is_in_thread = True
        while (following := self._next()) is not None:
            self._make_pages(following)

    def _next(self) -> _FreshBlock | None:
        with self._lock:
            if self._queue:
                return self._queue.popleft()
            self._has_begun = self._is_submitted = False
            return None

    def _make_pages(self, block: _FreshBlock) -> None:
        while not self._is_done(block):
            at = block.at
            end = min((at // STEP_BYTES + 1) * STEP_BYTES, block.end)
            # If the kernel cannot, they are made as they are written to.
            block.at = end if populate(at, end - at) else block.end
            if self._waiting:
                self._tell_soon()
        self._tell_soon()

    def _is_done(self, block: _FreshBlock) -> bool:
        """Return whether a block wants no more pages for now."""
        with self._lock:  # or it would want some that nobody makes
            if block.at < block.wanted and not self._is_closed:
                return False
            block.is_queued = block.is_in_thread = False
            return True

    def _tell_soon(self) -> None:
        """Tell those who wait, from the thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._tell)

    def _tell(self) -> None:
        self._blocks = [block for block in self._blocks if not block.is_over]
        waiting, self._waiting = self._waiting, {}
        for tell in waiting:
            tell()

    def _on_end(self, _: None, error: BaseException | None) -> None:
        """Go on without pages if the thread has failed."""
        if error is not None:
            self.close()
            if not isinstance(error, ClosedError):  # that of the worker, in order
                raise error
