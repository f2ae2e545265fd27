"""The messages of rounds; docs/reference/wire-protocol.md has them all.

Messages travel unchanged, except for payloads.  These are cut into pieces of
`PIECE_BYTES`, at most `PIECES_MAX` in one message.  So a message stays small, and each
piece short enough to be inline in the message's value.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import msgpack

from asyncrpc.errors import MalformedError
from asyncrpc.ids import Incarnation
from asyncrpc.runtime.messages import Notice, message
from asyncrpc.runtime.rounds.machine.messages import (
    MISSING_MAX,
    Key,
    KnownArrivals,
    Payloads,
    Replicas,
    Report,
    Result,
    RoundFailed,
    RoundMessage,
    WaitsElsewhere,
)
from asyncrpc.runtime.schema import Count, Number, Positive, Spread

SERVICE: Final = "rounds"
PAYLOAD_BYTES_MAX: Final = 1 << 20  # of one member
ROUND_BYTES_MAX: Final = 16 << 20  # of all members: every member receives so much
TAG_CHARS_MAX: Final = 1024
PIECE_BYTES: Final = 16 << 10  # the limit of inline bytes; see `serde.encoding`
PIECES_MAX: Final = 16
PART_BYTES: Final = PIECE_BYTES * PIECES_MAX
# What msgpack adds to each payload, at most.
_PAYLOAD_OVERHEAD: Final = 5
PROBLEM_CHARS_MAX: Final = 4096  # of a failure


def payload_bytes_max(members: int) -> int:
    """Return the limit of the payload of each member, in bytes."""
    return min(PAYLOAD_BYTES_MAX, ROUND_BYTES_MAX // members)


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """A part of the payloads of some members.

    Attributes:
        index: the number of the part, from 0.
        parts: the number of parts.
        pieces: pieces of the payloads' msgpack; empty if all payloads are empty.
    """

    index: Count
    parts: Positive
    pieces: list[bytes]


@message(
    SERVICE, "arrivals", about="a series in which sender and receiver are neighbours"
)
class ArrivalsNotice(Notice):
    """The state of the sender, and the arrivals that it knows."""

    key: Spread[Key]
    content: Spread[KnownArrivals]


@message(
    SERVICE, "failed", about="a series in which sender and receiver are neighbours"
)
class FailedNotice(Notice):
    """A round has failed."""

    key: Spread[Key]
    content: Spread[RoundFailed]


@message(
    SERVICE, "elsewhere", about="a series in which sender and receiver are neighbours"
)
class ElsewhereNotice(Notice):
    """A missing member waits in another round."""

    key: Spread[Key]
    content: Spread[WaitsElsewhere]


@message(SERVICE, "up", about="the branch of the sender, a child of the receiver")
class UpNotice(Notice):
    """A part of a report."""

    key: Spread[Key]
    number: Count
    passed: Number
    part: Spread[PayloadPart]


@message(
    SERVICE, "down", about="a series in which the sender is the parent of the receiver"
)
class DownNotice(Notice):
    """A part of a result."""

    key: Spread[Key]
    number: Count
    part: Spread[PayloadPart]


@message(SERVICE, "left_out", about="the sender, which has a rank, and the receiver")
class LeftOutNotice(Notice):
    """The group of the sender ends without the receiver, which was believed lost.

    Attributes:
        incarnation: the incarnation of the receiver.
    """

    incarnation: Incarnation


PlainNotice = ArrivalsNotice | FailedNotice | ElsewhereNotice
PartNotice = UpNotice | DownNotice


# --- out -----------------------------------------------------------------------------


def notices(
    key: Key, content: RoundMessage, parts: list[PayloadPart]
) -> Iterator[Notice]:
    """Yield the notices that carry a message of a round.

    Args:
        key: the series of the message.
        content: the message to send.
        parts: the payloads of a report or a result, as `pack` returned them.
    """
    match content:
        case KnownArrivals():
            yield ArrivalsNotice(key, content)
        case RoundFailed():
            yield FailedNotice(key, content)
        case WaitsElsewhere():
            yield ElsewhereNotice(key, content)
        case Report():
            for part in parts:
                yield UpNotice(key, content.number, content.passed, part)
        case Result():
            for part in parts:
                yield DownNotice(key, content.number, part)


def pack(payloads: Payloads) -> list[PayloadPart]:
    """Return payloads as parts."""
    if not any(payloads):
        return [PayloadPart(0, 1, [])]
    blob: bytes = msgpack.packb(payloads)
    view = memoryview(blob)
    starts = range(0, len(blob), PART_BYTES)
    return [
        PayloadPart(
            index,
            len(starts),
            [
                bytes(view[at : at + PIECE_BYTES])
                for at in range(start, min(start + PART_BYTES, len(blob)), PIECE_BYTES)
            ],
        )
        for index, start in enumerate(starts)
    ]


# --- in ------------------------------------------------------------------------------


def check_replicas(replicas: Replicas, size: int) -> None:
    """Refuse replicas that do not name a series of this group.

    Args:
        replicas: ranks of the members.
        size: number of workers in the group.

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


def check_message(
    content: KnownArrivals | RoundFailed | WaitsElsewhere, members: int, size: int
) -> None:
    """Refuse a message that contradicts itself.

    Args:
        content: the received message.
        members: number of members of the series.
        size: number of workers in the group.

    Raises:
        MalformedError: a number of the message is out of range, or contradicts another.
    """
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
    if not is_right:
        raise MalformedError("a number of the message is out of range")


def check_part(part: PayloadPart, members: int) -> None:
    """Refuse a part that cannot belong to payloads.

    Args:
        part: the received part.
        members: number of members of the series.

    Raises:
        MalformedError: the part's index, number of parts or pieces are out of range.
    """
    most = members * (payload_bytes_max(members) + _PAYLOAD_OVERHEAD)
    if not (
        part.index < part.parts <= (most + _PAYLOAD_OVERHEAD) // PART_BYTES + 1
        and (part.pieces or part.parts == 1)
        and len(part.pieces) <= PIECES_MAX
        and all(len(one) <= PIECE_BYTES for one in part.pieces)
    ):
        raise MalformedError("a part of payloads has numbers or pieces out of range")


@dataclass(slots=True)
class Arriving:
    """The parts of the payloads of one neighbour that have come, in order.

    Attributes:
        head: the kind of the notice, the number of the round, and the number of parts.
        pieces: the pieces that have come.
        parts: the number of parts that have come.
    """

    head: tuple[type[PartNotice], int, int]
    pieces: list[bytes] = field(default_factory=list)
    parts: int = 0

    @property
    def nbytes(self) -> int:
        """Number of bytes that have come."""
        return sum(map(len, self.pieces))

    @property
    def is_whole(self) -> bool:
        """Whether all parts have come."""
        return self.parts == self.head[2]


def take_part(so_far: Arriving | None, notice: PartNotice) -> Arriving | None:
    """Take one part of payloads; return None if earlier parts are missing.

    Args:
        so_far: the earlier parts, if any.
        notice: the received notice.
    """
    part = notice.part
    head = type(notice), notice.number, part.parts
    if not part.index:
        so_far = Arriving(head)
    if so_far is None or so_far.head != head or so_far.parts != part.index:
        return None
    so_far.pieces += part.pieces
    so_far.parts += 1
    return so_far


def unpack(pieces: list[bytes], members: int, most_bytes: int) -> Payloads:
    """Return the payloads that all the pieces hold.

    Args:
        pieces: all pieces, in order.
        members: the number of members, each with one payload.
        most_bytes: the limit of each payload.

    Raises:
        MalformedError: the pieces are not msgpack, or not one payload per member, or a
            payload is too long.
    """
    if not pieces:
        return (b"",) * members
    wanted = f"payloads must be {members} byte strings of at most {most_bytes} bytes"

    def checked(parts: list[Any]) -> tuple[bytes, ...]:
        """Refuse the first list within the list: it may have millions."""
        if len(parts) != members or any(type(part) is not bytes for part in parts):
            raise MalformedError(wanted)
        return tuple(parts)

    no_others = {"max_map_len": 0, "max_str_len": 0, "max_ext_len": 0}
    try:
        payloads = msgpack.unpackb(b"".join(pieces), list_hook=checked, **no_others)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"payloads must be msgpack: {error}") from error
    if type(payloads) is not tuple or any(
        len(payload) > most_bytes for payload in payloads
    ):
        raise MalformedError(wanted)
    return payloads
