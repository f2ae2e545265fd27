"""The functions that one peer has given numbers to, on one connection.

A name travels once: its number stands for it from then on.  The peer relies on that
from the moment it sends the first request, so the name is kept whatever else is wrong
with that request; the function is looked up with each request until it is found.
"""

from __future__ import annotations

from collections.abc import Callable
from sys import getsizeof
from typing import Any, Final

from asyncrpc.errors import MalformedError
from asyncrpc.runtime.calls.modes import Target

# Functions one peer may name here: more than any program has, few enough to hold.
NAMES_MAX: Final = 1 << 16
NAME_LENGTH_MAX: Final = 512  # of one that gets a number; longer ones travel each time
# What they may take, each with an entry in two tables.
NAMES_BYTES_MAX: Final = 24 << 20
NAME_BYTES: Final = 200


class NamedFunctions:
    """The functions that a peer's numbers stand for.

    Attributes:
        targets: those that have been found, by their numbers.
    """

    __slots__ = ("_find", "_names", "_names_bytes", "targets")

    def __init__(self, find: Callable[[str], Target]) -> None:
        """Begin with none; `find` returns the target of a name, or raises."""
        self._find = find
        self._names: dict[int, str] = {}
        self._names_bytes = 0
        self.targets: dict[int, Target] = {}

    def learn(self, target: list[Any]) -> None:
        """Keep the name that a request gives to a number, before anything can fail.

        Raises:
            MalformedError: the name has the wrong type or is too long, or there are too
                many.
        """
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
        """Return what a number, or a number with a name, stands for; None for others.

        Raises:
            MalformedError: the number has never been named.
            DecodeError: this worker has no function of that name.
            RejectedError: the policy does not allow it.
        """
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
        found = self._find(name)
        if number:
            self.targets[number] = found
        return found

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
