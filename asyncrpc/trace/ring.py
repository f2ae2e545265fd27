"""The last events of one kind, and who else takes them.

Noting an event must cost next to nothing.  So an event is noted as a plain tuple of its
fields, by a method that is that of a `deque` unless somebody listens, and becomes an
object of its class only when somebody looks.

What is kept must cost nothing, either.  Python's collector looks at all that may be
part of a cycle, and a tuple of numbers and strings is not: it forgets such tuples when
it first comes by.  One named tuple in them, and thousands of events grow old in its
care, until it looks through the whole heap: of 256 calls at a time that took a tenth.
So a worker is noted as a plain tuple.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

from asyncrpc.ids import WorkerId

RECENT_MAX: Final = 2000  # events of each kind

E = TypeVar("E", bound=tuple[Any, ...])
Fields = tuple[Any, ...]
Sink = Callable[[Fields], None]


def plain(worker: WorkerId) -> tuple[str, int]:
    """Return a worker as events are noted with it."""
    return worker.name, int(worker.incarnation)


class EventRing(Generic[E]):
    """The events of one kind.

    Attributes:
        kind: class of the events.
        make: makes one of the fields that were noted.
        record: notes an event, given as a tuple of its fields; from any thread.  Ask
            for it each time: it is another one while somebody listens.
    """

    __slots__ = ("_recent", "_sinks", "kind", "make", "record")

    def __init__(self, kind: type[E], worker_at: int | None = None) -> None:
        """Begin without events.

        Args:
            kind: class of the events.
            worker_at: which field is a worker, noted as `plain`; None: none is.
        """
        self.kind = kind
        self.make: Callable[[Fields], E] = _maker(kind, worker_at)
        self._recent: deque[Fields] = deque(maxlen=RECENT_MAX)
        self._sinks: tuple[Sink, ...] = ()
        self.record: Sink = self._recent.append

    @property
    def recent(self) -> list[E]:
        """The last events, the oldest first.

        Thread safety: from any thread.
        """
        return [self.make(fields) for fields in self._recent.copy()]

    def newest(self, since_s: float, at_most: int) -> list[E]:
        """Return the events since a moment, the oldest first; so many, the newest.

        Thread safety: from any thread.
        """
        found: list[E] = []
        for fields in reversed(self._recent.copy()):
            if fields[0] < since_s or len(found) >= at_most:
                break
            found.append(self.make(fields))
        found.reverse()
        return found

    def add_sink(self, sink: Sink) -> None:
        """Call a function with each event from now on; it must not wait or raise."""
        self._sinks = (*self._sinks, sink)
        self.record = self._record_and_tell

    def remove_sink(self, sink: Sink) -> None:
        """Call a function no more."""
        self._sinks = tuple(one for one in self._sinks if one != sink)
        if not self._sinks:
            self.record = self._recent.append

    def _record_and_tell(self, fields: Fields) -> None:
        self._recent.append(fields)
        for sink in self._sinks:
            sink(fields)


def _maker(kind: type[E], worker_at: int | None) -> Callable[[Fields], E]:
    make = cast("Any", kind)._make
    if worker_at is None:
        return cast("Callable[[Fields], E]", make)

    def make_with_worker(fields: Fields) -> E:
        worker = WorkerId(*fields[worker_at])
        event: E = make((*fields[:worker_at], worker, *fields[worker_at + 1 :]))
        return event

    return make_with_worker
