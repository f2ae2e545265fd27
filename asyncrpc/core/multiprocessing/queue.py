"""A queue between processes of one host: `Queue`.

It is written from scratch rather than over `multiprocessing.Queue`, whose feeder thread
deadlocks programs, loses items when a process ends early, and copies every tensor into
new memory.  Here nothing runs in the background: an item is in shared memory when `put`
returns.

This module waits, and packs; `asyncrpc.core.shm.channel` is the queue.

Source: multiprocessing.Queue for the names, torch.multiprocessing for the treatment of
tensors.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import select
from multiprocessing import reduction
from queue import Empty, Full
from typing import Any, Final, Generic, TypeVar, cast

from asyncrpc.core.arguments import check_count, check_timeout
from asyncrpc.core.loop.clock import Clock, Deadline
from asyncrpc.core.multiprocessing.packing import PackedItem, unpack
from asyncrpc.core.multiprocessing.processes import refuse_on_loop
from asyncrpc.core.serde.shared import MappedFiles
from asyncrpc.core.shm.channel import ITEMS_POLL_S, ROOM_POLL_S, Channel, Ends
from asyncrpc.errors import UsageError

T = TypeVar("T")

ITEMS_DEFAULT: Final = 1024
ITEMS_MAX: Final = 1 << 20  # half a KiB each
MEMORY_BYTES_DEFAULT: Final = 1 << 30
MEMORY_BYTES_MAX: Final = 1 << 38  # each process uses 50 times as many addresses
_MEMORY_BYTES_MIN: Final = 1 << 20
_MS_PER_S: Final = 1000


class Queue(Generic[T]):
    """Takes items from any process of this host to any other, in order.

    Pass it to processes when they start: by the `args` of `launch` or `spawn`, or those
    of a `multiprocessing.Process` that starts by `spawn` or `forkserver`.

    Any value that pickle can handle may be put.  Tensors travel through shared memory:
    `put` copies them once; `get` returns tensors over that memory, which are writable
    and hold it until the last of them is dropped.  A tensor that is in shared memory
    already is not copied at all, and stays the same memory on both sides: after
    `asyncrpc.share`, after `Tensor.share_memory_`, and after it came out of this queue.
    So sending a tensor back costs nothing, and saves its sender the memory of the next
    copy.  Views of one storage stay so; gradients and large numpy arrays travel in the
    same way.

    No thread and no process runs behind it.  The producer may end, even by SIGKILL, as
    soon as `put` returns: the item stays.  A killed process takes along at most the
    item that it was getting; the others go on, and get its memory.  Nothing is ever
    left in /dev/shm: the memory has no name, and ends with the last process that has
    the queue or a tensor from it.

    Processes that share a queue trust each other, as those of one `launch` do: items
    are pickles, which can run anything.

    Args:
        maxsize: items that may wait in it; at least 1.
        memory_bytes: memory for tensors, and for pickles of more than some hundred
            bytes, both of waiting items and of items that were got and are still held.
            It is taken from the system as it is used.  If all of it is in use, `put`
            waits until a process drops tensors.

    Raises:
        UsageError: a limit is out of range, or this system has no memfd_create(2).

    Thread safety:
        Any thread and any event loop may use it.  `close` it only after the last use by
        any thread.

    Example:
        >>> def work(rank: int, tasks: Queue[Tensor], results: Queue[Tensor]) -> None:
        ...     results.put(tasks.get() * rank)
        >>> if __name__ == "__main__":
        ...     tasks, results = Queue(), Queue()
        ...     with launch(work, (tasks, results), nprocs=4, join=False):
        ...         for batch in batches:
        ...             tasks.put(batch)

    Source: multiprocessing.Queue, with these differences: `put` itself waits, not a
    thread; there is always a bound; there is nothing to join; `timeout_s` names its
    unit; and there are `put_async` and `get_async`.
    """

    def __init__(
        self, maxsize: int = ITEMS_DEFAULT, *, memory_bytes: int = MEMORY_BYTES_DEFAULT
    ) -> None:
        check_count("maxsize", maxsize, at_least=1, at_most=ITEMS_MAX)
        check_count(
            "memory_bytes",
            memory_bytes,
            at_least=_MEMORY_BYTES_MIN,
            at_most=MEMORY_BYTES_MAX,
        )
        self._use(Channel.create(memory_bytes, maxsize))

    def _use(self, channel: Channel) -> None:
        self._channel = channel
        self._known = MappedFiles()
        self._clock = Clock()

    # --- putting ---------------------------------------------------------------------

    def put(self, item: T, timeout_s: float | None = None) -> None:
        """Put an item, and wait for room if necessary.

        Args:
            item: it is pickled, and its tensors are copied, before this returns.
            timeout_s: seconds to wait at most; None is no limit.

        Raises:
            queue.Full: no room came in time; nothing was put.
            UsageError: called on a running event loop, on a closed queue or in a forked
                process; `timeout_s` is not a number of seconds; or the item cannot be
                pickled, is larger than the queue, or has a tensor that is part of a
                graph.  Nothing was put.
        """
        refuse_on_loop("Queue.put", "await Queue.put_async() or Queue.put_nowait()")
        deadline = self._deadline(timeout_s)
        parcel = PackedItem(item, self._channel, self._known)
        while not parcel.advance():
            left_s = self._left_s(deadline)
            if left_s <= 0:
                raise Full
            _wait(self._channel.ends.room, min(left_s, ROOM_POLL_S))

    def put_nowait(self, item: T) -> None:
        """Put an item if there is room.

        Args:
            item: see `put`.

        Raises:
            queue.Full: there is no room; nothing was put.
            UsageError: see `put`.
        """
        if not PackedItem(item, self._channel, self._known).advance():
            raise Full

    async def put_async(self, item: T) -> None:
        """Put an item, and wait for room without blocking the event loop.

        Only the waiting is asynchronous: the copy of a tensor, about 0.2 ms a MiB, is
        made on the loop.

        Args:
            item: see `put`; do not change it until this returns.

        Raises:
            UsageError: see `put`.
            Exception: the error of pickle; nothing was put.

        Cancellation:
            Nothing was put.
        """
        parcel = PackedItem(item, self._channel, self._known)
        await asyncio.sleep(0)  # always a cancellation point
        while not parcel.advance():
            await _wait_async(self._channel.ends.room, ROOM_POLL_S)

    # --- getting ---------------------------------------------------------------------

    def get(self, timeout_s: float | None = None) -> T:
        """Take the oldest item, waiting for one if necessary.

        Args:
            timeout_s: seconds to wait at most; None is no limit.

        Returns:
            The item; its tensors are in shared memory.

        Raises:
            queue.Empty: no item came in time.
            UsageError: called on a running event loop, on a closed queue or in a forked
                process; or `timeout_s` is not a number of seconds.
            OSError: the item has tensors with descriptors, and this process cannot have
                more descriptors.  The item is still there.
            Exception: the error of unpickling; the item is gone.
        """
        refuse_on_loop("Queue.get", "await Queue.get_async() or Queue.get_nowait()")
        deadline = self._deadline(timeout_s)
        while (item := self._channel.take()) is None:
            left_s = self._left_s(deadline)
            if left_s <= 0:
                raise Empty
            _wait(self._channel.ends.items, min(left_s, ITEMS_POLL_S))
        return cast("T", unpack(item, self._channel, self._known))

    def get_nowait(self) -> T:
        """Take the oldest item if there is one.

        Returns:
            The item; its tensors are in shared memory.

        Raises:
            queue.Empty: the queue is empty.
            UsageError: the queue is closed, or this is a forked process.
            OSError: see `get`.
            Exception: the error of unpickling; the item is gone.
        """
        item = self._channel.take()
        if item is None:
            raise Empty
        return cast("T", unpack(item, self._channel, self._known))

    async def get_async(self) -> T:
        """Take the oldest item, waiting for one without blocking the event loop.

        Returns:
            The item; its tensors are in shared memory.

        Raises:
            UsageError: the queue is closed, or this is a forked process.
            OSError: see `get`.
            Exception: the error of unpickling; the item is gone.

        Cancellation:
            No item is taken: there is no waiting between an item and its return.
        """
        await asyncio.sleep(0)  # always a cancellation point
        while (item := self._channel.take()) is None:
            await _wait_async(self._channel.ends.items, ITEMS_POLL_S)
        return cast("T", unpack(item, self._channel, self._known))

    # --- what it looks like ----------------------------------------------------------

    def qsize(self) -> int:
        """Return how many items wait; others may change the number at any time."""
        return len(self._channel)

    def empty(self) -> bool:
        """Return whether no item waits; others may change that at any time."""
        return not len(self._channel)

    def full(self) -> bool:
        """Return whether `maxsize` items wait; others may change that at any time."""
        return self._channel.is_full

    def close(self) -> None:
        """End this process's use of the queue, and close its descriptors.  Idempotent.

        There is nothing to wait for: items that were put stay for the others, as do
        tensors that came out.  Do not call it while another thread or coroutine of this
        process waits in the queue.  Without it, the queue ends with its last reference.
        """
        self._channel.close()

    # --- on its way to a new process -------------------------------------------------

    def __reduce__(self) -> tuple[Any, ...]:
        if multiprocessing.context.get_spawning_popen() is None:
            raise UsageError(
                "a queue can be passed to a process only when the process starts, in "
                "the args of asyncrpc.multiprocessing.launch or of "
                "multiprocessing.Process"
            )
        ends = self._channel.ends
        sent = [reduction.DupFd(descriptor) for descriptor in _descriptors(ends)]
        return _arrived, (sent, ends.limit_bytes, ends.items_max)

    # --- time ------------------------------------------------------------------------

    def _deadline(self, timeout_s: float | None) -> Deadline | None:
        if timeout_s is None:
            return None
        check_timeout("timeout_s", timeout_s)
        return Deadline.after(timeout_s, self._clock.now_s())

    def _left_s(self, deadline: Deadline | None) -> float:
        if deadline is None:
            return float("inf")
        return deadline.remaining_s(self._clock.now_s())


def _descriptors(ends: Ends) -> tuple[int, ...]:
    return ends.memory, ends.items, ends.room, *ends.passage


def _arrived(sent: list[Any], limit_bytes: int, items_max: int) -> Queue[Any]:
    """Make the queue in the process that it was passed to."""
    memory, items, room, sending, receiving = [duplicate.detach() for duplicate in sent]
    queue: Queue[Any] = Queue.__new__(Queue)
    queue._use(  # noqa: SLF001  its constructor would make another
        Channel(Ends(memory, items, room, (sending, receiving), limit_bytes, items_max))
    )
    return queue


def _wait(event: int, patience_s: float) -> None:
    poll = select.poll()
    poll.register(event, select.POLLIN)
    poll.poll(patience_s * _MS_PER_S)


async def _wait_async(event: int, patience_s: float) -> None:
    loop = asyncio.get_running_loop()
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    # A descriptor of our own, since a loop has only one reader for each descriptor.
    own = os.dup(event)
    try:
        loop.add_reader(own, wake)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await ready
    finally:
        loop.remove_reader(own)
        os.close(own)
