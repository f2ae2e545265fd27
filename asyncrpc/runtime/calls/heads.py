"""The head of a request, in few bytes: a function's name travels once per connection.

The caller (`SentHeads`) gives a number to each function with the first request for it;
from then on the number is sent.  The callee (`ReceivedHeads`) keeps what each number
stands for, and knows heads that hold only a number by their bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from asyncrpc.errors import MalformedError
from asyncrpc.runtime.calls.function_names import NAME_LENGTH_MAX, NamedFunctions
from asyncrpc.runtime.calls.modes import Target
from asyncrpc.wire.messages import Meta, pack_head, unpack_head

# Functions one connection gives numbers to: more than any program has.
NAMES_MAX: Final = 1 << 16

_NO_META: Final[dict[str, Any]] = {}


class SentHeads:
    """The heads of the requests to one peer, and the numbers that it was told."""

    __slots__ = ("_given", "_sent")

    def __init__(self) -> None:
        # The number of each function, and the head that holds only the number.
        self._sent: dict[str, tuple[int, bytes]] = {}
        self._given = 0

    def known(self, target: str | list[Any] | None, meta: Meta | None) -> bytes:
        """Return the head of a request; empty if its function has no number yet."""
        if type(target) is not str:
            return pack_head([target, meta])
        found = self._sent.get(target)
        if found is None:
            return b""
        return pack_head([found[0], meta]) if meta else found[1]

    def introduce(
        self, target: str, meta: Meta | None, *, may_come_late: bool
    ) -> bytes:
        """Return the head of a request for a function that has no number yet.

        Args:
            target: its name.
            meta: what travels beside the arguments.
            may_come_late: whether later requests may overtake it, or it may be given
                up: then its function gets no number, since they would rely on it.
        """
        is_kept = len(target) <= NAME_LENGTH_MAX and len(self._sent) < NAMES_MAX
        if may_come_late or not is_kept:
            return pack_head([[0, target], meta])
        # Never one that was taken before: its request may have been written.
        number = self._given + 1
        head = pack_head([[number, target], meta])
        self._given = number
        # Only now: packing may have refused.
        self._sent[target] = number, pack_head([number])
        return head

    def forget(self, target: str | list[Any] | None) -> None:
        """Forget a function's number: its request may not have been written."""
        if type(target) is str:
            self._sent.pop(target, None)


class ReceivedHeads:
    """The heads of the requests of one peer.

    Attributes:
        functions: what the peer's numbers stand for.
        known: what `read` returns for heads that hold only a number.
    """

    __slots__ = ("functions", "known")

    def __init__(self, find: Callable[[str], Target]) -> None:
        """Begin with none; `find` returns the target of a name, or raises."""
        self.functions = NamedFunctions(find)
        self.known: dict[bytes, tuple[Target, dict[str, Any]]] = {}

    def read(self, head: bytes) -> tuple[Any, dict[str, Any]]:
        """Return the target, as far as it is known, and the metadata of a request.

        Raises:
            MalformedError: the head is not that of a request.
        """
        record = unpack_head(head)
        if not record:
            raise MalformedError("a request names no function")
        if type(record[0]) is list:
            self.functions.learn(record[0])
        if len(record) != 1:
            meta = record[1]
            if meta is not None and type(meta) is not dict:
                raise MalformedError("the metadata of a request must be a map")
            return record[0], meta or _NO_META
        number = record[0]
        found = self.functions.targets.get(number) if type(number) is int else None
        if found is None:
            return record[0], _NO_META
        if len(self.known) < NAMES_MAX:  # a number can be written in several ways
            self.known[head] = found, _NO_META
        return found, _NO_META
