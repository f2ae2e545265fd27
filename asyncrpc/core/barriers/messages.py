"""The messages of barriers, rendezvous and the end, and the keys of their series.

docs/reference/wire-protocol.md describes them all.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Final, NamedTuple, TypeAlias

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.services.schema import (
    Bits,
    Count,
    EnumName,
    Notice,
    Number,
    Spread,
    message,
)
from asyncrpc.errors import MalformedError

SERVICE: Final = "rounds"
TAG_CHARS_MAX: Final = 1024
PROBLEM_CHARS_MAX: Final = 4096  # of a failure
MISSING_MAX: Final = 64  # ranks in a failure
LISTED_MAX: Final = 8  # ranks in a text
_NEIGHBOURS: Final = "a series in which sender and receiver are neighbours"

# Ranks in the order of a call; None: all of the group.
Replicas: TypeAlias = tuple[Number, ...] | None


class Purpose(enum.Enum):
    """The purpose of a series; series of different purposes are independent."""

    BARRIER = "barrier"
    RENDEZVOUS = "rendezvous"
    END = "wave"


class Key(NamedTuple):
    """The name of a series; `tag` is that of a rendezvous, or the lives of the end."""

    purpose: Annotated[Purpose, EnumName(Purpose)]
    tag: str
    replicas: Replicas

    def label(self, number: int | None = None) -> str:
        """Return the description of a round in errors; None: its number is unknown."""
        purpose = self.purpose.value
        label = f"a {purpose}" if number is None else f"{purpose} {number}"
        if self.purpose is Purpose.RENDEZVOUS:
            return f"{label} of {self.tag!r}"
        return f"{label} of the end" if self.purpose is Purpose.END else label


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
    """How a round failed: for whose fault, and together with which of the same tag."""

    blame: Annotated[Blame, EnumName(Blame)]
    problem: str
    missing: tuple[Number, ...] = ()  # ranks that are gone, or not known to have come
    failed_with: TagRound | None = None


@message(SERVICE, "arrivals", about=_NEIGHBOURS)
class KnownArrivals(Notice):
    """The round that the sender has come to last, and the arrivals that it knows."""

    key: Spread[Key]
    number: Number
    passed: Number  # the last round that it knows to be passed
    is_waiting: bool  # at round `number`
    latest: Number  # the latest round that it has heard of
    known: Annotated[int, Bits()]  # who has come to that, one bit for each place


@message(SERVICE, "report", about="the branch of the sender, a child of the receiver")
class Report(Notice):
    """All members of the sender's branch have come; whether one of them set a mark."""

    key: Spread[Key]
    number: Count
    passed: Number
    is_marked: bool


@message(SERVICE, "result", about="a series in which the sender is the parent")
class Result(Notice):
    """All members have come; whether one of them set a mark."""

    key: Spread[Key]
    number: Count
    is_marked: bool


@message(SERVICE, "failed", about=_NEIGHBOURS)
class RoundFailed(Notice):
    """A round has failed."""

    key: Spread[Key]
    number: Number
    passed: Number
    failure: Failure


@message(SERVICE, "elsewhere", about=_NEIGHBOURS)
class WaitsElsewhere(Notice):
    """A member that is missing in round `number` waits in another round of the tag."""

    key: Spread[Key]
    number: Number
    rank: Number
    elsewhere: TagRound


@message(SERVICE, "left_out", about="the sender, which has a rank, and the receiver")
class LeftOutNotice(Notice):
    """The group of the sender ends without the receiver, which was believed lost."""

    incarnation: Incarnation  # of the receiver


SeriesNotice: TypeAlias = KnownArrivals | Report | Result | RoundFailed | WaitsElsewhere


def check_replicas(replicas: Replicas, size: int) -> None:
    """Refuse replicas that do not name a series of a group of `size` workers."""
    if replicas is None:
        return
    ranks = set(replicas)
    if len(ranks) != len(replicas) or not ranks <= set(range(size)):
        raise MalformedError("replicas must be distinct ranks of the group")
    if replicas == tuple(range(size)):
        raise MalformedError("replicas must be nil for the whole group in order")


def check_notice(notice: SeriesNotice, members: int, size: int) -> None:
    """Refuse a message of a series of so many members that contradicts itself."""
    is_right = True
    match notice:
        case KnownArrivals():
            is_of_members = notice.known.bit_length() <= members
            is_right = is_of_members and notice.number <= notice.latest
        case RoundFailed(failure=failure):
            if failure.failed_with is not None:
                check_replicas(failure.failed_with.replicas, size)
            is_right = (
                len(failure.missing) <= MISSING_MAX
                and len(failure.problem) <= PROBLEM_CHARS_MAX
                and all(0 <= rank < size for rank in failure.missing)
            )
        case WaitsElsewhere():
            check_replicas(notice.elsewhere.replicas, size)
            is_right = 0 <= notice.rank < size
    if not is_right:
        raise MalformedError("a number of the message is out of range")
