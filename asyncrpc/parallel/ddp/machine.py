"""Which gradients are reduced together, and when: buckets, as data.

A bucket can be reduced when the gradients of all of its parameters are there, and when
all buckets before it are being reduced: every rank must begin the same reductions in
the same order, in whatever order gradients come.

Parameters are numbers here, from 0 up; this module knows no tensors.

Source: torch/csrc/distributed/c10d/reducer.cpp, `compute_bucket_assignment_by_size`
and `mark_variable_ready`.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class ParameterSpec(NamedTuple):
    """The properties of a parameter that decide its bucket.

    Attributes:
        kind: a dtype and a device; all parameters of a bucket share it.
        is_alone: whether it has a bucket to itself, as for a sparse gradient.
    """

    nbytes: int
    kind: Hashable
    is_alone: bool = False


def assign(
    items: Sequence[ParameterSpec],
    order: Sequence[int],
    *,
    first_cap_bytes: int,
    cap_bytes: int,
) -> list[list[int]]:
    """Put parameters into buckets."""
    filled: list[list[int]] = []
    open_: dict[Hashable, tuple[list[int], int]] = {}
    begun: set[Hashable] = set()
    for number in order:
        nbytes, kind, is_alone = items[number]
        if is_alone:
            filled.append([number])
            continue
        bucket, held_bytes = open_.pop(kind, ([], 0))
        bucket.append(number)
        held_bytes += nbytes
        if held_bytes >= (cap_bytes if kind in begun else first_cap_bytes):
            begun.add(kind)
            filled.append(bucket)
        else:
            open_[kind] = bucket, held_bytes
    filled += [bucket for bucket, _ in open_.values()]
    at = {number: position for position, number in enumerate(order)}
    return sorted(filled, key=lambda bucket: at[bucket[-1]])


class Readiness:
    """Which gradients of one backward pass have come, and what can be reduced.

    Attributes:
        order: the parameters whose gradients have come, in that order.
        counts: how often the gradient of each parameter has come.
        reduced: how many buckets, from the first on, can be reduced.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[int]],
        uses: Sequence[int],
        *,
        is_held: bool = False,
    ) -> None:
        """Begin a pass.

        Args:
            uses: how often the gradient of each parameter comes in a pass; 0: never.
        """
        self._bucket_of = [0] * len(uses)
        for bucket, numbers in enumerate(buckets):
            for number in numbers:
                self._bucket_of[number] = bucket
        self._remaining = list(uses)
        self._missing = [
            sum(uses[number] > 0 for number in numbers) for numbers in buckets
        ]
        self._is_held = is_held
        self.counts = [0] * len(uses)
        self.order: list[int] = []
        self.reduced = 0
        self._advance()

    def is_expected(self, number: int) -> bool:
        """Return whether a gradient may still come."""
        return self._is_held or self._remaining[number] > 0

    def arrive(self, number: int) -> bool:
        """Record that a gradient has come; return whether it is complete now."""
        self.counts[number] += 1
        if self.counts[number] == 1:
            self.order.append(number)
        if self._is_held:
            return False
        self._remaining[number] -= 1
        return self._remaining[number] == 0

    def ready(self, number: int) -> int:
        """Record that a complete gradient is in its bucket; return `reduced`."""
        self._remaining[number] = 0
        self._missing[self._bucket_of[number]] -= 1
        self._advance()
        return self.reduced

    def missing(self) -> list[int]:
        """Return the parameters whose gradients have not come, or not often enough."""
        return [
            number for number, remaining in enumerate(self._remaining) if remaining > 0
        ]

    def release(self) -> list[int]:
        """Stop holding; return the parameters whose gradients are complete now."""
        held = list(self.order) if self._is_held else []
        self._is_held = False
        return held

    def _advance(self) -> None:
        while (
            not self._is_held
            and self.reduced < len(self._missing)
            and not self._missing[self.reduced]
        ):
            self.reduced += 1
