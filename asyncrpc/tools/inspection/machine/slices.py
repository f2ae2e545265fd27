"""Work that is done in slices, so that it holds an event loop only for a moment.

It is a generator: it yields the amount of work of each slice, and returns the result.
The caller can do other work between two slices.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from itertools import islice
from typing import Any, Final, TypeAlias, TypeVar

T = TypeVar("T")

SLICE_MAX: Final = 500  # small things, such as rows: half a millisecond

Slices: TypeAlias = Generator[int, None, T]


def finished(work: Slices[T]) -> T:
    """Do all slices of some work at once; return the result."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result


def parts_of(things: Iterable[T], at_most: int = SLICE_MAX) -> Iterable[list[T]]:
    """Yield things in lists of at most `at_most`."""
    it = iter(things)
    while part := list(islice(it, at_most)):
        yield part


def weighed_parts(
    things: Iterable[T], weight_of: Callable[[T], int], at_most: int = SLICE_MAX
) -> Iterable[tuple[list[T], int]]:
    """Yield things that differ in work in lists, each with its total weight."""
    part, weight = list[T](), 0
    for thing in things:
        more = max(1, weight_of(thing))
        if part and weight + more > at_most:
            yield part, weight
            part, weight = [], 0
        part.append(thing)
        weight += more
    if part:
        yield part, weight


def let_go(
    things: list[Any] | dict[Any, Any] | set[Any], at_most: int = SLICE_MAX
) -> Slices[None]:
    """Drop the last references to things, in slices.

    Freeing twenty thousand rows takes ten milliseconds, in which the loop is held.

    Args:
        things: the container to empty; nothing else may refer to its content.
    """
    take = things.popitem if isinstance(things, dict) else things.pop
    while things:
        count = min(at_most, len(things))
        for _ in range(count):
            take()
        yield count
