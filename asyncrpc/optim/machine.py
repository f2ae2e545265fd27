"""Decides whose turn it is to change parameters.

A holder asks for a turn on a set of parameters.  It has it when no holder that came
before shares a parameter with it, and keeps it until it ends.  So holders that share
nothing go at once, those that share go in the order in which they came, and nobody is
passed by for ever.

Workers that wait for one another are not seen here.  Who takes turns on several workers
and keeps them takes them in the order of the workers' ids: then nobody waits in a
circle.

Source: strict two-phase locking with ordered acquisition.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from asyncrpc.errors import LocalProtocolError


class Turns:
    """Who has a turn, and who waits for one."""

    __slots__ = ("_keys", "_waiting")

    def __init__(self) -> None:
        self._keys: dict[int, AbstractSet[int]] = {}  # by holder, in order of arrival
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def ask(self, holder: int, keys: AbstractSet[int]) -> bool:
        """Take up a holder; say whether it has its turn at once.

        Raises:
            LocalProtocolError: it is here already.  Nothing changed.
        """
        if holder in self._keys:
            raise LocalProtocolError(f"holder {holder} has asked for a turn before")
        is_free = all(keys.isdisjoint(others) for others in self._keys.values())
        self._keys[holder] = keys
        if not is_free:
            self._waiting.add(holder)
        return is_free

    def end(self, holder: int) -> list[int]:
        """Let a holder go, whether it has its turn or waits.

        Returns:
            Those that have their turn now, in the order in which they came.
        """
        if self._keys.pop(holder, None) is None:
            return []
        self._waiting.discard(holder)
        begun = [one for one in self._keys if one in self._waiting and self._may(one)]
        self._waiting.difference_update(begun)
        return begun

    def _may(self, holder: int) -> bool:
        """Return whether nobody who came before shares a key with this one."""
        keys = self._keys[holder]
        for other, others in self._keys.items():
            if other == holder:
                return True
            if not keys.isdisjoint(others):
                return False
        return True
