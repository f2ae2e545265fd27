"""Memory that peers lend to this worker: mapped slabs, and the places in use.

A message refers to places in its sender's slabs.  Each place becomes a view backed by a
`Lease`, which dies with the last tensor over that view, in any thread; then the place
goes back to its sender.  All places of one turn of the loop go back together, or just
before an answer that is written in that turn.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol, Self

from asyncrpc.errors import MalformedError
from asyncrpc.shm.machine.pool import OFFSET_BITS, OFFSET_MASK
from asyncrpc.shm.slab import Slab
from asyncrpc.wire.frames import FrameKind, prefix

_FREE: Final = int(FrameKind.FREE)


class Lease:
    """Lives as long as a place is in use; keeps the slab mapped."""

    __slots__ = ("__weakref__", "_slab")

    def __init__(self, slab: Slab) -> None:
        self._slab = slab


class Lender(Protocol):
    """Gets places back."""

    def take_back(self, locations: list[int]) -> None:
        """Take back places that are no longer used."""


class BorrowingConnection(Protocol):
    """A connection, as `Borrowed` needs it."""

    @property
    def join(self) -> Callable[[bytes], None]:
        """Write a message that can wait."""


class BorrowingLink(Protocol):
    """The way to a peer whose memory is used."""

    @property
    def is_lost(self) -> bool:
        """Whether the connection has ended for good."""

    @property
    def connection(self) -> BorrowingConnection:
        """The connection that carries the messages."""


class _LeaseWatch(weakref.ref[Lease]):
    """Reports the death of a lease, at half the cost of `finalize`."""

    __slots__ = ("lender", "location")

    lender: Lender
    location: int

    def __new__(cls, lease: Lease, on_death: Callable[[Any], None], *_: object) -> Self:
        return super().__new__(cls, lease, on_death)

    def __init__(
        self,
        lease: Lease,
        on_death: Callable[[Any], None],
        lender: Lender,
        location: int,
    ) -> None:
        """Store lender and location; `__new__` makes the weak reference."""
        self.lender = lender
        self.location = location


class Borrowed:
    """The slabs of one peer that this worker has mapped.

    Attributes:
        slabs: the mapped slabs by id; the peer chooses the ids.
    """

    __slots__ = ("_leases", "link", "slabs")

    def __init__(self, leases: Leases, link: BorrowingLink) -> None:
        self._leases = leases
        self.link = link
        self.slabs: dict[int, Slab] = {}

    @property
    def size_bytes(self) -> int:
        """The total size of all slabs."""
        return sum(slab.size_bytes for slab in list(self.slabs.values()))

    def place(self, location: int, nbytes: int) -> memoryview:
        """Return the memory that a message of the peer refers to.

        Raises:
            MalformedError: the place is not in a slab that the peer has passed.
        """
        slab = self.slabs.get(location >> OFFSET_BITS)
        start = location & OFFSET_MASK
        if slab is None or not nbytes or start + nbytes > slab.size_bytes:
            raise MalformedError(
                f"{nbytes} bytes at {location:#x} do not lie in a slab of the peer"
            )
        return self._leases.lend(self, slab, location, nbytes)

    def take_back(self, locations: list[int]) -> None:
        """Tell the peer that these places are free again."""
        if not self.link.is_lost:
            join = self.link.connection.join
            for location in locations:
                join(prefix(_FREE, location))


class Leases:
    """The leases of places in the slabs of peers, and in the worker's own slabs.

    Attributes:
        dead: dead leases whose places have not gone back yet.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._thread_id = threading.get_ident()
        self._watches: set[_LeaseWatch] = set()
        self._noted = False
        self.dead: deque[_LeaseWatch] = deque()

    def __len__(self) -> int:
        """Return the number of places in use."""
        return len(self._watches) - len(self.dead)

    def lend(
        self, lender: Lender, slab: Slab, location: int, nbytes: int
    ) -> memoryview:
        """Return a view of a place; the place goes back when the view is dead."""
        lease = Lease(slab)
        self._watches.add(_LeaseWatch(lease, self._on_death, lender, location))
        return slab.view(lease, location & OFFSET_MASK, nbytes)

    def _on_death(self, watch: _LeaseWatch) -> None:
        """Queue a place for the loop: this may run in any thread, at any time."""
        self.dead.append(watch)
        if self._noted:
            return
        self._noted = True
        is_here = threading.get_ident() == self._thread_id
        loop = self._loop
        try:
            (loop.call_soon if is_here else loop.call_soon_threadsafe)(self._on_noted)
        except RuntimeError:  # the loop is closed, and with it every link
            self.dead.clear()

    def _on_noted(self) -> None:
        self._noted = False
        self.give_back()

    def give_back(self) -> None:
        """Give dead places back to their lenders.  Cheap if no lease has died."""
        by_lender: dict[Lender, list[int]] = {}
        while self.dead:
            watch = self.dead.popleft()
            self._watches.discard(watch)
            by_lender.setdefault(watch.lender, []).append(watch.location)
        for lender, locations in by_lender.items():
            lender.take_back(locations)
