"""What members of a round say to each other, and of which rounds.

Words are records; they travel as they are (see `runtime.schema`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, TypeAlias

from asyncrpc.runtime.schema import Bits, EnumName, Number

# Ranks in the order of a call; None: all of the group.
Replicas: TypeAlias = tuple[Number, ...] | None
Payloads: TypeAlias = tuple[bytes, ...]

LISTED_MAX: Final = 8  # ranks in a text
MISSING_MAX: Final = 64  # ranks in a failure


class Purpose(enum.Enum):
    """What rounds are for: those of one purpose know nothing of another's."""

    BARRIER = "barrier"
    RENDEZVOUS = "rendezvous"
    END = "wave"


class Key(NamedTuple):
    """What names a series of rounds.

    Attributes:
        purpose: of the rounds.
        tag: of a rendezvous, as its callers say; else empty.
        replicas: ranks of the members.
    """

    purpose: Annotated[Purpose, EnumName(Purpose)]
    tag: str
    replicas: Replicas

    def label(self, number: int) -> str:
        """Return how a round is called in errors."""
        return f"{self.purpose.value} {number}{self._of}"

    @property
    def any_label(self) -> str:
        """What a round is called whose number is not known."""
        return f"a {self.purpose.value}{self._of}"

    @property
    def _of(self) -> str:
        if self.purpose is Purpose.RENDEZVOUS:
            return f" of {self.tag!r}"
        return " of the end" if self.purpose is Purpose.END else ""


class Turn(NamedTuple):
    """One round of a tag: of whom, and the how manieth of theirs."""

    replicas: Replicas
    number: Number


class Blame(enum.Enum):
    """Why a round failed."""

    GAVE_UP = "a member gave up"
    LOST = "a member is gone"
    MISMATCH = "members passed different replicas"


@dataclass(frozen=True, slots=True)
class Failure:
    """How a round failed.

    Attributes:
        blame: why.
        problem: in words.
        missing: ranks of those that had not come, as far as was known, or are gone.
        twin: the round that failed with it, under the same tag.
    """

    blame: Annotated[Blame, EnumName(Blame)]
    problem: str
    missing: tuple[Number, ...] = ()
    twin: Turn | None = None


class Here(NamedTuple):
    """What a member knows.

    Attributes:
        number: of the round that it has come to last.
        passed: of the last one that it knows to be passed.
        is_waiting: whether it waits at `number`.
        latest: number of the latest round that it has heard of.
        known: who has come to that one: bits by place.
    """

    number: Number
    passed: Number
    is_waiting: bool
    latest: Number
    known: Annotated[int, Bits()]


class Report(NamedTuple):
    """A child has the payloads of its branch, in order."""

    number: int
    passed: int
    payloads: Payloads


class Result(NamedTuple):
    """A parent has those of all."""

    number: int
    payloads: Payloads


class RoundFailed(NamedTuple):
    """A round has failed."""

    number: Number
    passed: Number
    failure: Failure


class Doubt(NamedTuple):
    """A member that is missed in round `number` waits elsewhere under the tag."""

    number: Number
    rank: Number
    elsewhere: Turn


Word: TypeAlias = Here | Report | Result | RoundFailed | Doubt


def mask_of(places: range) -> int:
    """Return places as bits."""
    return (1 << places.stop) - (1 << places.start)


def places_of(mask: int) -> list[int]:
    """Return the places whose bits are set, in ascending order."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]
