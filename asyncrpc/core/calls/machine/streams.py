"""Streams: the order of items at the consumer, and how far the producer runs ahead.

Large items may overtake small ones on the wire, so items are numbered, and
`StreamOrder` gives them out in order.  `StreamCredit` counts what was sent and not
taken.

Sans-IO; items are never looked into.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class StreamState(enum.Enum):
    """What the consumer's end of a stream waits for."""

    OPEN = "items, and the end"
    ENDED = "items that the end has overtaken"
    WHOLE = "nothing: the end and every item are here"


class StreamOrder(Generic[T]):
    """The items of a stream as they arrive, given out by their numbers.

    Attributes:
        next_serial: number of the item to be given out next.
        end: how many items there are in all; None until the end has come.
    """

    __slots__ = ("_items", "end", "next_serial")

    def __init__(self) -> None:
        self._items: dict[int, T] = {}
        self.next_serial = 0
        self.end: int | None = None

    @property
    def received(self) -> int:
        """How many items have come."""
        return self.next_serial + len(self._items)

    @property
    def state(self) -> StreamState:
        """Return what is still to come."""
        if self.end is None:
            return StreamState.OPEN
        return StreamState.WHOLE if self.received >= self.end else StreamState.ENDED

    @property
    def has_next(self) -> bool:
        """Return whether the next item has arrived."""
        return self.next_serial in self._items

    @property
    def is_empty(self) -> bool:
        """Return whether no item waits to be consumed."""
        return not self._items

    @property
    def is_over(self) -> bool:
        """Return whether every item has been consumed."""
        return self.end is not None and self.next_serial >= self.end

    def has(self, serial: int) -> bool:
        """Return whether an item has come before."""
        return serial < self.next_serial or serial in self._items

    def add(self, serial: int, item: T) -> None:
        """Take an item that has not come before."""
        self._items[serial] = item

    def take(self) -> T:
        """Give out the next item, which must be here."""
        item = self._items.pop(self.next_serial)
        self.next_serial += 1
        return item


class StreamCredit:
    """How far a producer may run ahead: one item may always be on its way."""

    __slots__ = ("_bytes", "_bytes_max", "_items_max", "_sizes")

    def __init__(self, items_max: int, bytes_max: int) -> None:
        self._items_max = items_max
        self._bytes_max = bytes_max
        self._sizes: deque[int] = deque()  # of the items not taken, the oldest first
        self._bytes = 0

    @property
    def outstanding(self) -> int:
        """Items sent and not taken."""
        return len(self._sizes)

    @property
    def has_room(self) -> bool:
        """Return whether one more item may be sent."""
        return len(self._sizes) < self._items_max and self._bytes < self._bytes_max

    def spend(self, nbytes: int) -> None:
        """Count an item of `nbytes` bytes that has been sent."""
        self._sizes.append(nbytes)
        self._bytes += nbytes

    def grant(self, items: int) -> None:
        """Count `items` more items that the consumer has taken."""
        for _ in range(min(items, len(self._sizes))):
            self._bytes -= self._sizes.popleft()
