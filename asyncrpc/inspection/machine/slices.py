"""Work that is done in slices, so that it holds an event loop only for a moment.

It is a generator that yields after each slice how much it has done since, and returns
what came of it.  Who drives it does something else between two slices.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")

SLICE_MAX: Final = 500  # small things, such as rows: half a millisecond

Slices: TypeAlias = Generator[int, None, T]


def finished(work: Slices[T]) -> T:
    """Do all of some work at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def parts_of(things: Iterable[T], at_most: int = SLICE_MAX) -> Iterable[list[T]]:
    """Yield things in lists of so many."""
    it = iter(things)
    while part := list(islice(it, at_most)):
        yield part


def weighed_parts(
    things: Iterable[T], weight_of: Callable[[T], int], at_most: int = SLICE_MAX
) -> Iterable[tuple[list[T], int]]:
    """Yield things in lists, each with its weight, for things that differ in work.

    Args:
        things: to be worked on.
        weight_of: how many small things one is made of.
        at_most: of one list, unless it has one thing that weighs more.
    """
    part, weight = list[T](), 0
    for one in things:
        more = max(1, weight_of(one))
        if part and weight + more > at_most:
            yield part, weight
            part, weight = [], 0
        part.append(one)
        weight += more
    if part:
        yield part, weight


def let_go(
    things: list[Any] | dict[Any, Any] | set[Any], at_most: int = SLICE_MAX
) -> Slices[None]:
    """Forget things, the last references to them, in slices.

    To free twenty thousand rows takes ten milliseconds, which a loop is held for as by
    any other work.

    Args:
        things: are taken from it; nothing else must refer to them.
        at_most: of one slice.
    """
    take = things.popitem if isinstance(things, dict) else things.pop
    while things:
        count = min(at_most, len(things))
        for _ in range(count):
            take()
        yield count
