"""One bit from every rank to every rank, without a centre: who has come, and how.

Each rank speaks to those 1, 2, 4, ... ranks after it, and hears from those before it.
It speaks to the one 2^k after it once it knows the 2^k ranks that end with itself, so
that after ceil(log2(members)) messages everyone knows of everyone.  What is told is all
that is known, as bits by rank: it is merged, so order, repetition and overlap do no
harm, and the number of members need be no power of two.

Who hears nothing for a while tells all that it knows to all whom it speaks to.  So
knowledge also goes round a rank that is late or dead, and those who wait can name it.

Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all
communications in multiport message-passing systems", 1997; its dissemination is that of
Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class Gathering:
    """What one rank knows of the others, and whom it is to tell.

    Attributes:
        known: bits of the ranks that have come, as far as is known here.
        marked: of these, the bits of those that came with a mark.
    """

    __slots__ = ("_members", "_place", "_reach", "_told", "_whole", "known", "marked")

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        """Begin with nobody.

        Args:
            rank: of this worker; one of `members`.
            members: the ranks that take part, in ascending order.
        """
        self._members = tuple(members)
        self._place = self._members.index(rank)
        self._whole = mask_of(members)
        self._reach = 0  # ranks known without a gap, from this one backwards
        self._told: dict[int, int] = {}  # what each rank has been told last
        self.known = 0
        self.marked = 0

    @property
    def has_come(self) -> bool:
        """Whether this rank itself has."""
        return bool(self.known >> self._members[self._place] & 1)

    @property
    def is_whole(self) -> bool:
        """Whether everybody has come."""
        return self.known == self._whole

    @property
    def missing(self) -> list[int]:
        """The ranks that have not come, as far as is known here."""
        return ranks_of(self._whole & ~self.known)

    def come(self, *, marked: bool) -> None:
        """This rank has come."""
        rank = self._members[self._place]
        self.merge(1 << rank, int(marked) << rank)

    def merge(self, known: int, marked: int) -> None:
        """Take what another rank knows; of strangers nothing is taken."""
        self.known |= known & self._whole
        self.marked |= marked & self.known
        count = len(self._members)
        while self._reach < count and self.known >> self._before(self._reach) & 1:
            self._reach += 1

    def due(self) -> list[int]:
        """Return the ranks to be told now, and take it that they are."""
        if not self.has_come:
            return []
        reached = zip(self._distances(), self.listeners, strict=True)
        return self._tell(
            [
                rank
                for distance, rank in reached
                if distance <= self._reach and rank not in self._told
            ]
        )

    @property
    def listeners(self) -> list[int]:
        """The ranks to which this one speaks."""
        return [self._after(distance) for distance in self._distances()]

    def overdue(self) -> list[int]:
        """Return the ranks to be told after a silence, and take it that they are.

        They are those that have not been told all that is known here.
        """
        if not self.has_come:
            return []
        told = self._told
        return self._tell([to for to in self.listeners if told.get(to) != self.known])

    def awaited(self) -> list[int]:
        """Return the ranks to be heard from that are not known to have come."""
        before = map(self._before, self._distances())
        return [rank for rank in before if not self.known >> rank & 1]

    def _tell(self, ranks: list[int]) -> list[int]:
        for rank in ranks:
            self._told[rank] = self.known
        return ranks

    def _distances(self) -> list[int]:
        return [1 << step for step in range((len(self._members) - 1).bit_length())]

    def _after(self, distance: int) -> int:
        return self._members[(self._place + distance) % len(self._members)]

    def _before(self, distance: int) -> int:
        return self._members[(self._place - distance) % len(self._members)]


def mask_of(ranks: Iterable[int]) -> int:
    """Return ranks as bits."""
    mask = 0
    for rank in ranks:
        mask |= 1 << rank
    return mask


def ranks_of(mask: int) -> list[int]:
    """Return the ranks whose bits are set, in ascending order."""
    return [rank for rank in range(mask.bit_length()) if mask >> rank & 1]
