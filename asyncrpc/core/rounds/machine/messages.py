"""The messages of rounds, and the keys of series.

They are records that travel unchanged (see `runtime.schema`).
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, TypeAlias

from asyncrpc.core.services.schema import Bits, EnumName, Number

# Ranks in the order of a call; None: all of the group.
Replicas: TypeAlias = tuple[Number, ...] | None

LISTED_MAX: Final = 8  # ranks in a text
MISSING_MAX: Final = 64  # ranks in a failure


class Purpose(enum.Enum):
    """The purpose of a series; series of different purposes are independent."""

    BARRIER = "barrier"
    RENDEZVOUS = "rendezvous"
    END = "wave"


class Key(NamedTuple):
    """The name of a series of rounds.

    Attributes:
        purpose: the purpose of the rounds.
        tag: the tag of a rendezvous, as its callers pass it; else empty.
        replicas: the ranks of the members.
    """

    purpose: Annotated[Purpose, EnumName(Purpose)]
    tag: str
    replicas: Replicas

    def label(self, number: int) -> str:
        """Return the description of a round in errors."""
        return f"{self.purpose.value} {number}{self._of}"

    @property
    def any_label(self) -> str:
        """The description of a round whose number is not known."""
        return f"a {self.purpose.value}{self._of}"

    @property
    def _of(self) -> str:
        if self.purpose is Purpose.RENDEZVOUS:
            return f" of {self.tag!r}"
        return " of the end" if self.purpose is Purpose.END else ""


class TagRound(NamedTuple):
    """Round `number` of the series of a tag with these replicas."""

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
        blame: the kind of the failure.
        problem: its description.
        missing: ranks of members that are gone, or were not known to have come.
        failed_with: the round of the same tag that failed together with this one.
    """

    blame: Annotated[Blame, EnumName(Blame)]
    problem: str
    missing: tuple[Number, ...] = ()
    failed_with: TagRound | None = None


class KnownArrivals(NamedTuple):
    """The state of a member, and the arrivals that it knows.

    Attributes:
        number: the round that it has come to last.
        passed: the last round that it knows to be passed.
        is_waiting: whether it waits at round `number`.
        latest: the latest round that it has heard of.
        known: the members that have come to round `latest`, one bit for each place.
    """

    number: Number
    passed: Number
    is_waiting: bool
    latest: Number
    known: Annotated[int, Bits()]


class Report(NamedTuple):
    """All members of a child's branch have come; whether one of them set a mark."""

    number: Number
    passed: Number
    is_marked: bool


class Result(NamedTuple):
    """All members have come, says the parent; whether one of them set a mark."""

    number: Number
    is_marked: bool


class RoundFailed(NamedTuple):
    """A round has failed."""

    number: Number
    passed: Number
    failure: Failure


class WaitsElsewhere(NamedTuple):
    """A member that is missing in round `number` waits in another round of the tag."""

    number: Number
    rank: Number
    elsewhere: TagRound


RoundMessage: TypeAlias = KnownArrivals | Report | Result | RoundFailed | WaitsElsewhere


def mask_of(places: range) -> int:
    """Return places as bits."""
    return (1 << places.stop) - (1 << places.start)


def places_of(mask: int) -> list[int]:
    """Return the places whose bits are set, in ascending order."""
    return [place for place in range(mask.bit_length()) if mask >> place & 1]
