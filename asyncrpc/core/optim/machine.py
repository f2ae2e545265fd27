"""Decides whose turn it is to change parameters.

A holder asks for a turn on a set of parameters.  It has the turn when no earlier holder
shares a parameter with it, and keeps it until it ends.  So holders without a common
parameter go at once, the others go in the order in which they came, and none waits
forever.

Cycles of workers that wait for one another are not detected here.  A trainer that takes
and keeps turns on several workers takes them in the order of the workers' ids, so that
no cycle arises.

Source: strict two-phase locking with ordered acquisition.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from asyncrpc.errors import LocalProtocolError


class Turns:
    """Which holders have a turn, and which wait for one."""

    __slots__ = ("_keys", "_waiting")

    def __init__(self) -> None:
        self._keys: dict[int, AbstractSet[int]] = {}  # by holder, in order of arrival
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def ask(self, holder: int, keys: AbstractSet[int]) -> bool:
        """Add a holder; return whether it has its turn at once."""
        if holder in self._keys:
            raise LocalProtocolError(f"holder {holder} has asked for a turn before")
        is_free = all(keys.isdisjoint(other_keys) for other_keys in self._keys.values())
        self._keys[holder] = keys
        if not is_free:
            self._waiting.add(holder)
        return is_free

    def end(self, holder: int) -> list[int]:
        """Let a holder go, whether it has its turn or waits."""
        if self._keys.pop(holder, None) is None:
            return []
        self._waiting.discard(holder)
        begun = [
            waiter
            for waiter in self._keys
            if waiter in self._waiting and self._may(waiter)
        ]
        self._waiting.difference_update(begun)
        return begun

    def _may(self, holder: int) -> bool:
        """Return whether no earlier holder shares a key with this one."""
        keys = self._keys[holder]
        for other, other_keys in self._keys.items():
            if other == holder:
                return True
            if not keys.isdisjoint(other_keys):
                return False
        return True
