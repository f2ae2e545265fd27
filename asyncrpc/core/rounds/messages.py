"""The messages of rounds; docs/reference/wire-protocol.md has them all."""

from __future__ import annotations

from typing import Final, TypeAlias

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.rounds.machine.messages import (
    MISSING_MAX,
    Key,
    KnownArrivals,
    Replicas,
    Report,
    Result,
    RoundFailed,
    RoundMessage,
    WaitsElsewhere,
)
from asyncrpc.core.services.messages import Notice, message
from asyncrpc.core.services.schema import Spread
from asyncrpc.errors import MalformedError

SERVICE: Final = "rounds"
TAG_CHARS_MAX: Final = 1024
PROBLEM_CHARS_MAX: Final = 4096  # of a failure
_NEIGHBOURS: Final = "a series in which sender and receiver are neighbours"


@message(SERVICE, "arrivals", about=_NEIGHBOURS)
class ArrivalsNotice(Notice):
    """The state of the sender, and the arrivals that it knows."""

    key: Spread[Key]
    content: Spread[KnownArrivals]


@message(SERVICE, "report", about="the branch of the sender, a child of the receiver")
class ReportNotice(Notice):
    """All members of the sender's branch have come."""

    key: Spread[Key]
    content: Spread[Report]


@message(SERVICE, "result", about="a series in which the sender is the parent")
class ResultNotice(Notice):
    """All members have come."""

    key: Spread[Key]
    content: Spread[Result]


@message(SERVICE, "failed", about=_NEIGHBOURS)
class FailedNotice(Notice):
    """A round has failed."""

    key: Spread[Key]
    content: Spread[RoundFailed]


@message(SERVICE, "elsewhere", about=_NEIGHBOURS)
class ElsewhereNotice(Notice):
    """A missing member waits in another round."""

    key: Spread[Key]
    content: Spread[WaitsElsewhere]


@message(SERVICE, "left_out", about="the sender, which has a rank, and the receiver")
class LeftOutNotice(Notice):
    """The group of the sender ends without the receiver, which was believed lost.

    Attributes:
        incarnation: the incarnation of the receiver.
    """

    incarnation: Incarnation


SeriesNotice: TypeAlias = (
    ArrivalsNotice | ReportNotice | ResultNotice | FailedNotice | ElsewhereNotice
)


def notice_of(key: Key, content: RoundMessage) -> SeriesNotice:
    """Return the notice that carries a message of a series."""
    match content:
        case KnownArrivals():
            return ArrivalsNotice(key, content)
        case Report():
            return ReportNotice(key, content)
        case Result():
            return ResultNotice(key, content)
        case RoundFailed():
            return FailedNotice(key, content)
        case WaitsElsewhere():
            return ElsewhereNotice(key, content)


def check_replicas(replicas: Replicas, size: int) -> None:
    """Refuse replicas that do not name a series of a group of `size` workers.

    Raises:
        MalformedError: a rank is not in the group, or is repeated; or the ranks are
            those of the whole group, for which nil stands.
    """
    if replicas is None:
        return
    ranks = set(replicas)
    if len(ranks) != len(replicas) or not ranks <= set(range(size)):
        raise MalformedError("replicas must be distinct ranks of the group")
    if replicas == tuple(range(size)):
        raise MalformedError("replicas must be nil for the whole group in order")


def check_message(content: RoundMessage, members: int, size: int) -> None:
    """Refuse a message that contradicts itself.

    Raises:
        MalformedError: a number of the message is out of range, or contradicts another.
    """
    is_right = True
    match content:
        case KnownArrivals():
            is_of_members = content.known.bit_length() <= members
            is_right = is_of_members and content.number <= content.latest
        case RoundFailed():
            failure = content.failure
            if failure.failed_with is not None:
                check_replicas(failure.failed_with.replicas, size)
            is_right = (
                len(failure.missing) <= MISSING_MAX
                and len(failure.problem) <= PROBLEM_CHARS_MAX
                and all(0 <= rank < size for rank in failure.missing)
            )
        case WaitsElsewhere():
            check_replicas(content.elsewhere.replicas, size)
            is_right = 0 <= content.rank < size
        case Report() | Result():
            is_right = content.number >= 0
    if not is_right:
        raise MalformedError("a number of the message is out of range")
