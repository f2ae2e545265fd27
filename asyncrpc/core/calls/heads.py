"""The head of a request, in few bytes: a function's name travels once per connection.

The caller (`SentHeads`) gives a number to each function with the first request for it;
from then on the number is sent.  The callee (`ReceivedHeads`) keeps what each number
stands for, and knows heads that hold only a number by their bytes.

The peer relies on a number from the moment it sends the first request with it, so the
name is kept whatever else is wrong with that request; the function is looked up with
each request until it is found (`NamedFunctions`).
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getsizeof
from typing import Any, Final

from asyncrpc.core.calls.modes import Target
from asyncrpc.core.serde.by_value import MARK as CODE
from asyncrpc.core.serde.by_value import CodeName
from asyncrpc.core.wire.frames import Meta, pack_head, unpack_head
from asyncrpc.errors import AsyncRpcError, MalformedError

# Functions one connection gives numbers to, and one peer may name here: more than any
# program has, few enough to hold.
NAMES_MAX: Final = 1 << 16
NAME_LENGTH_MAX: Final = 512  # of one that gets a number; longer ones travel each time
# What they may take, each with an entry in two tables.
NAMES_BYTES_MAX: Final = 24 << 20
NAME_BYTES: Final = 200

_NO_META: Final[dict[str, Any]] = {}


class SentHeads:
    """The heads of the requests to one peer, and the numbers that it was told.

    Attributes:
        numbered: the heads that hold only the number of a function, by its name.
    """

    __slots__ = ("_last", "_numbers", "numbered")

    def __init__(self) -> None:
        self.numbered: dict[str, bytes] = {}
        self._numbers: dict[str, int] = {}
        self._last = 0

    def known(self, target: str | list[Any] | None, meta: Meta | None) -> bytes:
        """Return the head of a request; empty if its function has no number yet."""
        if type(target) is not str:
            if type(target) is CodeName:
                return _head_of_code(target, meta)
            return pack_head([target, meta])
        if target not in self.numbered:
            return b""
        if not meta:
            return self.numbered[target]
        return pack_head([self._numbers[target], meta])

    def introduce(
        self, target: str, meta: Meta | None, *, may_come_late: bool
    ) -> bytes:
        """Return the head of a request for a function that has no number yet."""
        is_kept = len(target) <= NAME_LENGTH_MAX and len(self.numbered) < NAMES_MAX
        if may_come_late or not is_kept:
            return pack_head([[0, target], meta])
        # Never one that was taken before: its request may have been written.
        number = self._last + 1
        head = pack_head([[number, target], meta])
        self._last = number
        # Only now: packing may have refused.
        self._numbers[target], self.numbered[target] = number, pack_head([number])
        return head

    def forget(self, target: str | list[Any] | None) -> None:
        """Forget a function's number: its request may not have been written."""
        if type(target) is str:
            self.numbered.pop(target, None)
            self._numbers.pop(target, None)


def _head_of_code(name: CodeName, meta: Meta | None) -> bytes:
    """Return the head of a request for code, which gets no number: it may go again."""
    if meta:
        return pack_head([[0, str(name)], meta])
    if not name.head:
        name.head = pack_head([[0, str(name)]])
    return name.head


class ReceivedHeads:
    """The heads of the requests of one peer.

    Attributes:
        functions: what the peer's numbers stand for.
        known: what `read` returns for heads that hold only a number.
    """

    __slots__ = ("functions", "known")

    def __init__(self, find: Callable[[str], Target]) -> None:
        self.functions = NamedFunctions(find)
        self.known: dict[bytes, tuple[Target, dict[str, Any]]] = {}

    def read(self, head: bytes) -> tuple[Any, dict[str, Any]]:
        """Return the target, as far as it is known, and the metadata of a request."""
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
        if type(record[0]) is list:
            return self._known_code(head, record[0]), _NO_META
        number = record[0]
        target = self.functions.targets.get(number) if type(number) is int else None
        if target is None:
            return number, _NO_META
        if len(self.known) < NAMES_MAX:  # a number can be written in several ways
            self.known[head] = target, _NO_META
        return target, _NO_META

    def _known_code(self, head: bytes, named: list[Any]) -> Any:
        """Return what a head names; of code, remember it for as long as it is here."""
        if not _is_named(named) or named[0] or not named[1].startswith(CODE):
            return named
        try:
            target = self.functions.find(named)
        except AsyncRpcError:  # it is raised again where the request is answered
            return named
        if target is not None and target.cached_in is not None:
            target.cached_in.append((self.known, head))
            self.known[head] = target, _NO_META
        return target


class NamedFunctions:
    """The functions that a peer's numbers stand for.

    Attributes:
        targets: those that have been found, by their numbers.
    """

    __slots__ = ("_find", "_names", "_names_bytes", "targets")

    def __init__(self, find: Callable[[str], Target]) -> None:
        self._find = find
        self._names: dict[int, str] = {}
        self._names_bytes = 0
        self.targets: dict[int, Target] = {}

    def learn(self, target: list[Any]) -> None:
        """Keep the name that a request gives to a number, before anything can fail."""
        if not _is_named(target):
            return  # something for an extension
        if len(target) != 2 or type(target[1]) is not str:  # noqa: PLR2004
            raise MalformedError("a function must be named by a number and a string")
        number, name = target
        if number:
            if len(self._names) >= NAMES_MAX:
                raise MalformedError(
                    f"the peer has named more than {NAMES_MAX} functions"
                )
            if len(name) > NAME_LENGTH_MAX:
                raise MalformedError(
                    f"the peer has numbered a name of {len(name)} characters; the limit"
                    f" is {NAME_LENGTH_MAX}"
                )
            self._names_bytes += getsizeof(name) + NAME_BYTES
            if self._names_bytes > NAMES_BYTES_MAX:
                raise MalformedError(
                    f"the names that the peer has given to functions take more than"
                    f" {NAMES_BYTES_MAX} bytes"
                )
            self._names[number] = name

    def find(self, target: Any) -> Target | None:
        """Return what a number, or a number with a name, stands for, or None."""
        if type(target) is int:
            known = self.targets.get(target)
            if known is not None:
                return known
            number, name = target, self._names.get(target)
            if name is None:
                raise MalformedError(f"function {target} has not been named")
        elif _is_named(target):
            number, name = target
        else:
            return None
        function = self._find(name)
        if number:
            self.targets[number] = function
        return function

    def name_of(self, target: Any) -> str:
        """Return the name of the target of a request, "" if it is not known."""
        name = self._names.get(target) if type(target) is int else None
        # A name with its number, or a method of a value: both end with the name.
        if type(target) is list and target and type(target[-1]) is str:
            name = target[-1]
        return (name or "").rpartition(":")[2]


def _is_named(target: Any) -> bool:
    return type(target) is list and bool(target) and type(target[0]) is int


def name_of_value(function: Any) -> str:
    """Return a name for a function that arrived as a value, or is a method."""
    name = getattr(function, "__qualname__", None)
    return name if type(name) is str else type(function).__qualname__
