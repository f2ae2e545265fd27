"""Hearsay: which workers are known only because another said so, and by whom.

A name that one worker has told, and that no other has confirmed, is *unmet* until there
is a link to it.  Each teller has a share of them; when there is no room for a
newcomer, the oldest of whoever has told the most goes first.
"""

from __future__ import annotations

from typing import Final

from asyncrpc.core.ids import Incarnation

SHARE_MAX: Final = 4_096  # unmet names of one teller


class Hearsay:
    """The unmet names of one worker, by who told them."""

    def __init__(self) -> None:
        self._teller_of: dict[str, Incarnation] = {}
        self._names_of: dict[Incarnation, dict[str, None]] = {}  # the oldest first

    def __contains__(self, name: str) -> bool:
        return name in self._teller_of

    def has_room(self, teller: Incarnation) -> bool:
        """Return whether a worker may tell of one more."""
        return len(self._names_of.get(teller, ())) < SHARE_MAX

    def add(self, name: str, teller: Incarnation) -> None:
        """Record that a worker has told a name that was unknown."""
        self._teller_of[name] = teller
        self._names_of.setdefault(teller, {})[name] = None

    def discard(self, name: str) -> None:
        """A worker has been met, or is forgotten."""
        teller = self._teller_of.pop(name, None)
        if teller is not None:
            names = self._names_of[teller]
            del names[name]
            if not names:
                del self._names_of[teller]

    def confirm(self, by: Incarnation) -> None:
        """Another worker knows all these names, too: only its own stay unmet."""
        for name in [name for name, teller in self._teller_of.items() if teller != by]:
            self.discard(name)

    def names_from(self, teller: Incarnation) -> list[str]:
        """Return the unmet names that a worker has told."""
        return list(self._names_of.get(teller, ()))

    def oldest_of_the_most(self, newcomer: Incarnation | None) -> str:
        """Return which unmet name goes first; empty if none should.

        Args:
            newcomer: who tells of the one that needs room: it displaces none if it has
                told the most itself.  None: a worker that this one has met.
        """
        most = max(
            self._names_of, key=lambda teller: len(self._names_of[teller]), default=None
        )
        if most is None or most == newcomer:
            return ""
        return next(iter(self._names_of[most]))
