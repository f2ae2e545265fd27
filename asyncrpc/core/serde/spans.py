"""Which bytes a strided view covers, and whether to send them as they lie.

Integers only: no tensor, no memory.  The rule: the span of a view, holes included, is
sent raw with its strides if it is at most twice the covered bytes, or at most 64 KiB.
Otherwise the elements are gathered.  Views of one storage form a cluster if their union
satisfies the rule, or if they overlap; a cluster is sent as one buffer, so that aliases
stay aliases.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

# Below this a gather costs more than the bytes it saves: it takes 3 us plus the copy,
# and 64 KiB pass a loopback socket in about 10 us.
RAW_BYTES_MAX: Final = 64 << 10
RAW_RATIO_MAX: Final = 2


class Span(NamedTuple):
    """Bytes `start` to `stop` of a storage, of which `covered` are elements."""

    start: int
    stop: int
    covered: int

    def goes_raw(self) -> bool:
        """Return whether the span is sent raw, holes included."""
        size_bytes = self.stop - self.start
        return size_bytes <= max(RAW_BYTES_MAX, RAW_RATIO_MAX * self.covered)

    def join(self, other: Span) -> Span:
        """Return the union; its covered bytes are at most its length."""
        start, stop = min(self.start, other.start), max(self.stop, other.stop)
        return Span(start, stop, min(stop - start, self.covered + other.covered))


def reach(shape: Sequence[int], strides: Sequence[int]) -> int:
    """Return how many elements lie from the first to the last, both included."""
    last = 0
    for size, stride in zip(shape, strides, strict=True):
        if size == 0:
            return 0
        last += (size - 1) * stride
    return last + 1


def span_of(
    shape: Sequence[int], strides: Sequence[int], offset: int, item_bytes: int
) -> Span:
    """Return the span of a view of at least one element; `offset` is in elements."""
    size_bytes = reach(shape, strides) * item_bytes
    covered = item_bytes
    for size, stride in zip(shape, strides, strict=True):
        if stride:
            covered *= size
    start = offset * item_bytes
    return Span(start, start + size_bytes, min(covered, size_bytes))


def clusters(spans: Sequence[Span]) -> list[tuple[Span, list[int]]]:
    """Divide the views of one storage into clusters that travel together."""
    grouped: list[tuple[Span, list[int]]] = []
    for index in sorted(range(len(spans)), key=spans.__getitem__):
        span = spans[index]
        if grouped:
            union, members = grouped[-1]
            joined = union.join(span)
            if span.start < union.stop or joined.goes_raw():
                members.append(index)
                grouped[-1] = joined, members
                continue
        grouped.append((span, [index]))
    return grouped
