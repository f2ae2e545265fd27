"""A queue in shared memory, as one process has it: lock, memory, and what wakes others.

`machine.shelf` and `machine.ring` decide; this carries it out, under a lock that the
kernel frees when its holder is killed.  Nothing has a name anywhere: a memfd, two
eventfds and two sockets that vanish with the last process that has them, however that
ends.  No thread runs.

What a process holds is counted here, and written to its row of the memory.  A row
belongs to its process as long as the process locks the row's number (with a file
description of its own, so that the kernel releases the lock); so rows of dead processes
are found.

The eventfd `items` becomes readable when an item can be taken, and is drained by a
process that finds none; `room` is a hint for processes that wait for room.  Both are
written after the lock is released, so that no process wakes only to wait for the lock.
A process may be killed in between, and its death raises no signal: so waiting processes
look again now and then, after `ITEMS_POLL_S` and `ROOM_POLL_S`.

The lock is a POSIX mutex, *robust*: a process that takes it after its holder was killed
learns of that, and can repair what the dead process left.  It also checks errors, so
that a thread may release it without knowing whether it holds it.  That makes an
exception from a signal handler, which may strike between any two steps, harmless.

Taken without contention it costs no system call: 0.2 us.

Source: eventfd(2), fcntl(2) on open file description locks;
pthread_mutexattr_setrobust(3), pthread_mutex_consistent(3).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar, cast

from asyncrpc.core.shm.machine.ring import QueueItem, QueueRing
from asyncrpc.core.shm.machine.shelf import (
    DIRTY,
    MEMBERS_MAX,
    NONE,
    SIGNALLED,
    STARVING,
    Layout,
    Shelf,
)
from asyncrpc.core.shm.passing import DescriptorPassage, close_all, new_pair
from asyncrpc.core.shm.slab import Slab, is_supported
from asyncrpc.errors import UsageError

_ATTRIBUTES_BYTES: Final = 64  # 4 on x86-64, 8 on AArch64
_TRIES: Final = 64  # some 20 us, with the GIL: to give it up costs more than a try
_PROCESS_SHARED: Final = 1  # pthread.h of glibc and of musl
_ROBUST: Final = 1
_ERRORCHECK: Final = 2


class RobustMutex:
    """The mutex at an address."""

    __slots__ = ("_address", "release")

    def __init__(self, address: int) -> None:
        self._address = ctypes.c_void_p(address)
        # Releases it; does nothing if this thread does not have it.  No function of
        # Python's: at the start of one, an exception from a signal could strike.
        self.release = partial(_UNLOCK, self._address)

    def create(self) -> None:
        """Make the mutex; only for the creator of the memory, before others map it."""
        attributes = ctypes.create_string_buffer(_ATTRIBUTES_BYTES)
        _check(_LIBC.pthread_mutexattr_init(attributes))
        _check(_LIBC.pthread_mutexattr_setpshared(attributes, _PROCESS_SHARED))
        _check(_LIBC.pthread_mutexattr_setrobust(attributes, _ROBUST))
        _check(_LIBC.pthread_mutexattr_settype(attributes, _ERRORCHECK))
        _check(_LIBC.pthread_mutex_init(self._address, attributes))

    def acquire(self) -> None:
        """Take the lock, also after its holder died; wait while the holder lives."""
        # It is held for some microseconds; to sleep and be woken takes ten times that.
        for _ in range(_TRIES):
            number = _TRY_LOCK(self._address)
            if number != errno.EBUSY:
                break
        else:
            number = _LOCK(self._address)
        if number == errno.EOWNERDEAD:
            number = _LIBC.pthread_mutex_consistent(self._address)
        _check(number)


def _check(number: int) -> None:
    if number:
        raise OSError(number, f"a lock in shared memory: {os.strerror(number)}")


# The names of functions, and nothing else.  They return their error; errno is not set.
_LIBC: Final = ctypes.CDLL(None)
_QUICK: Final = ctypes.PyDLL(None)
_LOCK: Final[Any] = _LIBC.pthread_mutex_lock
_TRY_LOCK: Final[Any] = _QUICK.pthread_mutex_trylock
_UNLOCK: Final[Any] = _QUICK.pthread_mutex_unlock


T = TypeVar("T")

ROOM_POLL_S: Final = 0.05  # the memory of a killed process comes back silently
ITEMS_POLL_S: Final = 1.0  # seldom: a producer killed within microseconds of its put
# From here on the kernel makes a block's pages at once: one by one they cost more than
# the copy.
PREFAULT_BYTES: Final = 64 << 10
# Of the memory: the mutex of 40 bytes (48 on AArch64), then the words of `shelf`.
_LOCK_AT: Final = 0
_FLOCK: Final = struct.Struct("hhqqi4x")  # struct flock, on 64-bit Linux
_OFD_GETLK: Final = 36
_OFD_SETLK: Final = 37


@dataclass(frozen=True, slots=True)
class Ends:
    """What another process needs to open a channel.

    Attributes:
        items: of the eventfd that is readable while there are items.
        room: of the eventfd that hints at room.
        passage: of the two sockets.
    """

    memory: int
    items: int
    room: int
    passage: tuple[int, int]
    limit_bytes: int
    items_max: int


class Hold:
    """Keeps a block, and its memory, as long as anything refers to this object."""

    __slots__ = ("__weakref__", "block", "channel")

    def __init__(self, channel: Channel, block: int) -> None:
        self.channel = channel
        self.block = block

    def view(self, start: int, nbytes: int) -> memoryview:
        """Return memory of the channel that keeps this hold."""
        return self.channel.slab.view(self, start, nbytes)


class _HoldWatch(weakref.ref[Hold]):
    """Remembers the block of a hold, and reports when the hold is gone."""

    block = NONE  # if a signal's exception struck while it was made
    notifier: weakref.ref[Hold] | None = None

    # By identity: a referent that is gone has no hash any more.
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@dataclass(slots=True)
class TakenItem:
    """An item that this process has taken.

    Attributes:
        body: its bytes; may be a view of a block that is held.
        descriptors: those that came with it; the receiver closes them.
        makes_room: whether another process waits for room.
    """

    holds: list[Hold]
    body: bytes | memoryview
    descriptors: list[int]
    makes_room: bool


class Channel:
    """One process's part in a queue.

    Attributes:
        ends: to pass to other processes.
    """

    def __init__(self, ends: Ends) -> None:
        self.ends = ends
        layout = Layout(ends.limit_bytes, ends.items_max)
        with contextlib.ExitStack() as undo:
            self._passage = DescriptorPassage(ends.passage)
            for descriptor in (ends.items, ends.room, *ends.passage):
                undo.callback(os.close, descriptor)
            self.slab = Slab(ends.memory, layout.size_bytes)
            # A description of our own: locks belong to descriptions.
            self._locks = os.open(f"/proc/self/fd/{ends.memory}", os.O_RDWR)
            undo.callback(os.close, self._locks)
            self._set_up(layout)
            closing = weakref.finalize(self, undo.pop_all().close)
            closing.atexit = False
        self._closing = closing

    def _set_up(self, layout: Layout) -> None:
        memory = self.slab.memory
        control = memory[: layout.control_bytes]
        self.layout = layout
        self._shelf = Shelf(layout, control, self.slab.discard)
        self._ring = QueueRing(layout, memory, self._shelf)
        self._words = memory[: layout.entries_at].cast("Q")
        self._mutex = RobustMutex(self.slab.address + _LOCK_AT)
        self._turn = threading.RLock()  # only its owner may release it
        self._owner = 0  # the thread that has it
        self._holders: dict[int, set[_HoldWatch]] = {}  # of each block that is held
        self._dropped: deque[weakref.ref[Hold]] = deque()
        self._is_unsure = False  # an exception struck while we changed something
        self._is_closed = False
        self._pid = os.getpid()
        self._member = NONE
        self._member = self._exclusively(self._join)
        if self._member == NONE:
            raise UsageError(
                f"{MEMBERS_MAX} processes use this queue already, which is the limit"
            )

    @classmethod
    def create(cls, limit_bytes: int, items_max: int) -> Channel:
        """Make a new channel."""
        if not is_supported:
            raise UsageError("shared queues need memfd_create(2), which Linux has")
        layout = Layout(limit_bytes, items_max)
        with contextlib.ExitStack() as undo:
            slab = Slab.create(layout.size_bytes)
            RobustMutex(slab.address + _LOCK_AT).create()
            memory = os.dup(slab.descriptor)
            undo.callback(os.close, memory)
            events = []
            for _ in range(2):
                events.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
                undo.callback(os.close, events[-1])
            passage = new_pair()
            undo.pop_all()
        return cls(Ends(memory, events[0], events[1], passage, limit_bytes, items_max))

    # --- what there is ---------------------------------------------------------------

    def __len__(self) -> int:
        """Return how many items there are."""
        self._check()
        return len(self._ring)

    @property
    def is_full(self) -> bool:
        self._check()
        return self._ring.is_full

    def offset_of(self, address: int) -> int:
        """Return the offset of an address in the memory; `NONE`: not in a block."""
        offset = address - self.slab.address
        if self.layout.control_bytes <= offset < self.layout.size_bytes:
            return offset
        return NONE

    # --- putting ---------------------------------------------------------------------

    def reserve(self, sizes: Sequence[int]) -> list[Hold] | None:
        """Take blocks for an item: all of them, or none."""

        def take() -> list[tuple[Hold, bool]] | None:
            if not self._ring.is_full:
                blocks = self._allocate(sizes)
                if blocks is not None:
                    return [(self._hold(block), is_new) for block, is_new in blocks]
            self._starve()
            return None

        holds = self._exclusively(take)
        if holds is None:
            return None
        for (hold, is_new), size in zip(holds, sizes, strict=True):
            if is_new and size >= PREFAULT_BYTES:
                self.slab.prefault_part(self.layout.start_of(hold.block), size)
        return [hold for hold, _ in holds]

    def write_outside(self, blocks: Sequence[int], body: bytes) -> None:
        """Write an item that does not fit its slot into the last of its blocks."""
        self._ring.write_outside(blocks, body)

    def put(
        self, blocks: Sequence[int], body: bytes, descriptors: Sequence[int]
    ) -> bool:
        """Put an item.

        Args:
            descriptors: to pass along; they stay ours.
        """

        def append() -> tuple[bool, bool]:
            if self._ring.is_full:
                self._starve()
                return False, False
            if descriptors and not self._passage.send(self._ring.tag, descriptors):
                self._ring.set_epoch_apart()
                self._starve()
                return False, False
            is_news = not self._words[SIGNALLED]
            self._ring.put(blocks, body, len(descriptors))
            self._words[SIGNALLED] = 1
            return True, is_news

        is_put, is_news = self._exclusively(append)
        if is_news:
            os.eventfd_write(self.ends.items, 1)
        return is_put

    def _allocate(self, sizes: Sequence[int]) -> list[tuple[int, bool]] | None:
        blocks: list[tuple[int, bool]] = []
        has_reaped = False
        for size in sizes:
            block, is_new = self._shelf.allocate(self._member, size)
            if block == NONE and not has_reaped:
                self._reap()
                has_reaped = True
                block, is_new = self._shelf.allocate(self._member, size)
            if block == NONE:
                for block, _ in blocks:
                    self._shelf.let_go(self._member, block)
                return None
            blocks.append((block, is_new))
        return blocks

    def _starve(self) -> None:
        """Ask the processes that make room to signal it."""
        self._words[STARVING] = 1
        _drain(self.ends.room)

    # --- taking ----------------------------------------------------------------------

    def take(self) -> TakenItem | None:
        """Take the next item."""
        item = self._exclusively(self._pop)
        if isinstance(item, OSError):
            raise item
        if item is not None and item.makes_room:
            self._feed()
        return item

    def _pop(self) -> TakenItem | OSError | None:
        """Take an item; return an error, not raise it, so that nothing is half done."""
        item = self._ring.first()
        if item is None:
            _drain(self.ends.items)
            self._words[SIGNALLED] = 0
            return None
        descriptors: list[int] = []
        try:
            if item.descriptors:
                descriptors = self._passage.peek(item.tag, item.descriptors)
        except OSError as error:
            return error
        self._ring.take(item, self._member)
        holds = [self._hold(block) for block in item.blocks]
        makes_room = bool(self._words[STARVING])
        self._words[STARVING] = 0
        try:
            if item.descriptors:
                descriptors += self._passage.take_rest(item.descriptors)
        except OSError as error:
            close_all(descriptors)
            return error
        return TakenItem(holds, _body_of(item, holds), descriptors, makes_room)

    def _feed(self) -> None:
        """Wake the processes that wait for room."""
        with contextlib.suppress(BlockingIOError):  # it is full, and so readable
            os.eventfd_write(self.ends.room, 1)

    # --- one at a time ---------------------------------------------------------------

    def _exclusively(self, action: Callable[[], T]) -> T:
        """Run `action` while no other process changes anything."""
        self._check()
        words = self._words
        with self._turn:
            try:
                self._owner = threading.get_ident()
                self._mutex.acquire()
                if words[DIRTY] or self._is_unsure:
                    self._repair()
                words[DIRTY] = 1
                self._is_unsure = True
                result = action()
                words[DIRTY] = 0
                self._is_unsure = False
            finally:
                # After an exception, `DIRTY` is left for the next process.
                self._mutex.release()
                self._owner = 0
        if self._dropped:
            self._settle()
        return result

    def _repair(self) -> None:
        """Repair the state after this process, or another, was stopped half-way."""
        self._words[DIRTY] = 1
        if self._member != NONE:
            self._shelf.set_holds(self._member, self._holders)
        self._reap()
        self._ring.recover()
        self._words[SIGNALLED] = 1
        os.eventfd_write(self.ends.items, 1)  # a process that finds no item drains it
        self._feed()
        self._words[DIRTY] = 0
        self._is_unsure = False

    def _check(self) -> None:
        if self._is_closed:
            raise UsageError("this queue is closed in this process")
        if os.getpid() != self._pid:
            raise UsageError(
                "a queue cannot be used in a forked process: start it with 'spawn' "
                "or 'forkserver' and pass it the queue as an argument"
            )

    # --- members and what they hold --------------------------------------------------

    def _join(self) -> int:
        member = self._shelf.admit(self._is_alive)
        if member != NONE:
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, member, 1, 0)
            fcntl.fcntl(self._locks, _OFD_SETLK, request)
        return member

    def _is_alive(self, member: int) -> bool:
        if member == self._member:
            return True  # our own lock does not stand in our way
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, member, 1, 0)
        answer = fcntl.fcntl(self._locks, _OFD_GETLK, request)
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def _reap(self) -> None:
        """Take back the blocks of dead processes."""
        for member in self._shelf.members():
            if not self._is_alive(member):
                self._shelf.dismiss(member)

    def _hold(self, block: int) -> Hold:
        """Make one more hold of a block, which our row has already."""
        hold = Hold(self, block)
        # The callback that comes last is made first.  The other has no line of Python
        # in it, so an exception from a signal cannot strike before it has noted it.
        notifier = weakref.ref(hold, self._on_dropped)
        watch = _HoldWatch(hold, self._dropped.append)
        watch.block, watch.notifier = block, notifier
        self._holders.setdefault(block, set()).add(watch)
        return hold

    def _on_dropped(self, _: weakref.ref[Hold]) -> None:
        # At any time, in any thread, within anything: so it never waits.
        if os.getpid() == self._pid and self._owner != threading.get_ident():
            self._settle()

    def _settle(self) -> None:
        """Let go of the blocks whose holds are gone.

        If another thread has the lock, it comes here after releasing it.
        """
        while self._dropped:
            try:
                if not self._turn.acquire(blocking=False):
                    return
                while self._dropped:
                    self._let_go(cast("_HoldWatch", self._dropped[0]))
                    self._dropped.popleft()
            finally:
                # Not by `with`, whose `suppress` would be Python to be struck in.
                try:  # noqa: SIM105
                    self._turn.release()
                except RuntimeError:  # we do not have it
                    pass
        if self._words[STARVING]:
            self._feed()

    def _let_go(self, watch: _HoldWatch) -> None:
        """Take back a hold.  Idempotent, since a signal may strike anywhere in it."""
        if watch.block == NONE:
            return  # the next holder of the lock writes the row anew
        holders = self._holders.get(watch.block)
        if holders is not None:
            holders.discard(watch)
            if holders:
                return
            self._holders.pop(watch.block, None)
        self._shelf.let_go(self._member, watch.block)

    # --- the end ---------------------------------------------------------------------

    def close(self) -> None:
        """End this process's part; what it holds stays until released.  Idempotent.

        No other thread may wait for it.
        """
        if self._is_closed or os.getpid() != self._pid:
            return
        if not self._holders:
            self._exclusively(lambda: self._shelf.dismiss(self._member))
            self._is_closed = True
            self._closing()
        self._is_closed = True
        self.slab.close_descriptor()  # its mapping is enough


def _body_of(item: QueueItem, holds: Sequence[Hold]) -> bytes | memoryview:
    if item.body is not None:
        return item.body
    return holds[-1].view(item.body_at, item.body_bytes)


def _drain(event: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(event)
