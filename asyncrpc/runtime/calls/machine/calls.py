"""The calls of one connection, in both directions: waiting calls, and served ones.

`PendingCalls` is the caller's side, `ServedCalls` the callee's.  Both are generic over
the record that the service keeps for a call: here it is never looked into.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from asyncrpc.errors import MalformedError

R = TypeVar("R")


class PendingCalls(Generic[R]):
    """Calls that have been sent and not answered.

    Attributes:
        get: returns a call by its id; None if it does not wait any more.
        end: removes a call that waits, by its id.
    """

    __slots__ = ("_next_id", "_open", "end", "get")

    def __init__(self) -> None:
        self._next_id = 1
        self._open: dict[int, R] = {}
        # Those of the dictionary itself: asked for in every answer.
        self.get: Callable[[int], R | None] = self._open.get
        self.end: Callable[[int], R] = self._open.pop

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self._open.values()))

    @property
    def next_id(self) -> int:
        """The id of the next call."""
        return self._next_id

    @property
    def started(self) -> int:
        """How many calls have ever been sent."""
        return self._next_id - 1

    @property
    def calls(self) -> Mapping[int, R]:
        """Return the waiting calls, by id; always the same object."""
        return self._open

    def open(self, record: R) -> int:
        """Add a call; return its id, which is not used again on this connection."""
        call_id = self._next_id
        self._next_id = call_id + 1
        self._open[call_id] = record
        return call_id

    def take(self, call_id: int) -> R | None:
        """Remove the call and return it; None if it does not wait any more.

        Raises:
            MalformedError: no such call was ever sent: the peer made the answer up.
        """
        self.check(call_id)
        return self._open.pop(call_id, None)

    def check(self, call_id: int) -> None:
        """Refuse an answer to a call that was never made.

        Raises:
            MalformedError: no such call was ever sent: the peer made the answer up.
        """
        if not 0 < call_id < self._next_id:
            raise MalformedError(
                f"an answer came for call {call_id}, which was never made"
            )

    def take_all(self) -> list[R]:
        """Remove every call: the connection is gone."""
        records = list(self._open.values())
        self._open.clear()
        return records


class ServedCalls(Generic[R]):
    """Calls that a peer has sent and that have not been answered.

    Attributes:
        running: the calls, by id; always the same object.
        get: returns a call by its id; None if it is not running.
        end: forgets a call that runs, by its id: it has been answered, or its caller
            has gone.
    """

    __slots__ = ("end", "get", "running")

    def __init__(self) -> None:
        self.running: dict[int, R] = {}
        # Those of the dictionary itself: asked for in every answer.
        self.get: Callable[[int], R | None] = self.running.get
        self.end: Callable[[int], R] = self.running.pop

    def __len__(self) -> int:
        return len(self.running)

    def __iter__(self) -> Iterator[R]:
        return iter(tuple(self.running.values()))

    def begin(self, call_id: int, record: R) -> None:
        """Add a call.

        Raises:
            MalformedError: the peer uses an id twice.
        """
        if call_id in self.running:
            raise MalformedError(f"call {call_id} was made twice")
        self.running[call_id] = record
