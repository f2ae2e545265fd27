"""The last events of one kind, and the functions that take them.

Noting an event must cost next to nothing.  So an event is noted as a plain tuple of its
fields, by the method of a `deque` unless there are listeners, and becomes an object of
its class only when it is read.

Keeping events must cost nothing either.  Python's collector tracks all objects that may
be part of a cycle; it stops tracking a tuple of numbers and strings when it first
visits it.  If such a tuple held a named tuple, thousands of events would stay tracked
until the collector searches the whole heap, which took a tenth of the time of 256
calls at once.  So a worker, or any other named tuple, is noted as a plain tuple.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final, Generic, TypeVar, cast

RECENT_MAX: Final = 2000
"""Number of events of each kind that a worker keeps."""

E = TypeVar("E", bound=tuple[Any, ...])
Fields = tuple[Any, ...]
Sink = Callable[[Fields], None]
Restore = Callable[[Any], Any]
AS_NOTED: Final[Mapping[int, Restore]] = MappingProxyType({})  # no field is `plain`


# Returns a worker, or another named tuple, in the form noted in events: a plain tuple.
plain: Final[Callable[[tuple[Any, ...]], tuple[Any, ...]]] = itemgetter(slice(None))


class EventRing(Generic[E]):
    """The events of one kind.

    Attributes:
        kind: class of the events.
        make: makes an event from the noted fields.
        record: notes an event, given as a tuple of its fields; from any thread.  Read
            the attribute each time: it changes with the listeners.
    """

    __slots__ = ("_recent", "_sinks", "kind", "make", "record")

    def __init__(
        self, kind: type[E], made_by: Mapping[int, Restore] = AS_NOTED
    ) -> None:
        """Begin without events.

        Args:
            kind: class of the events.
            made_by: for each field that is noted as `plain`, the function that restores
                it.
        """
        self.kind = kind
        self.make: Callable[[Fields], E] = _maker(kind, made_by)
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
        """Return the newest `at_most` events since a moment, the oldest first.

        Thread safety: from any thread.
        """
        events: list[E] = []
        for fields in reversed(self._recent.copy()):
            if fields[0] < since_s or len(events) >= at_most:
                break
            events.append(self.make(fields))
        events.reverse()
        return events

    def add_sink(self, sink: Sink) -> None:
        """Call a function with each event from now on; it must not wait or raise."""
        self._sinks = (*self._sinks, sink)
        self.record = self._record_and_tell

    def remove_sink(self, sink: Sink) -> None:
        """Stop calling a function."""
        self._sinks = tuple(existing for existing in self._sinks if existing != sink)
        if not self._sinks:
            self.record = self._recent.append

    def _record_and_tell(self, fields: Fields) -> None:
        self._recent.append(fields)
        for sink in self._sinks:
            sink(fields)


def _maker(kind: type[E], made_by: Mapping[int, Restore]) -> Callable[[Fields], E]:
    make = cast("Callable[[Fields], E]", cast("Any", kind)._make)
    if not made_by:
        return make

    def make_again(fields: Fields) -> E:
        whole = list(fields)
        for at, restore in made_by.items():
            whole[at] = restore(whole[at])
        return make(tuple(whole))

    return make_again
