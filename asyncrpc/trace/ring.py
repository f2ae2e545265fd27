"""The last events of one kind, and who else takes them.

Noting an event must cost next to nothing.  So an event is noted as a plain tuple of its
fields, by a method that is that of a `deque` unless somebody listens, and becomes an
object of its class only when somebody looks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar, cast

RECENT_MAX: Final = 2000  # events of each kind

E = TypeVar("E", bound=tuple[Any, ...])
Fields = tuple[Any, ...]
Sink = Callable[[Fields], None]


class EventRing(Generic[E]):
    """The events of one kind.

    Attributes:
        kind: class of the events.
        record: notes an event, given as a tuple of its fields; from any thread.  Ask
            for it each time: it is another one while somebody listens.
    """

    __slots__ = ("_recent", "_sinks", "kind", "record")

    def __init__(self, kind: type[E]) -> None:
        self.kind = kind
        self._recent: deque[Fields] = deque(maxlen=RECENT_MAX)
        self._sinks: tuple[Sink, ...] = ()
        self.record: Sink = self._recent.append

    @property
    def recent(self) -> list[E]:
        """The last events, the oldest first.

        Thread safety: from any thread.
        """
        make = cast("Any", self.kind)._make
        return [make(fields) for fields in self._recent.copy()]

    def newest(self, since_s: float, at_most: int) -> list[E]:
        """Return the events since a moment, the oldest first; so many, the newest.

        Thread safety: from any thread.
        """
        make = cast("Any", self.kind)._make
        found: list[E] = []
        for fields in reversed(self._recent.copy()):
            if fields[0] < since_s or len(found) >= at_most:
                break
            found.append(make(fields))
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
