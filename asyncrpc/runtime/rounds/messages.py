"""The messages of rounds; docs/reference/wire-protocol.md has them all.

Words travel as they are, but for payloads: these go in pieces of `PIECE_BYTES`, and
`PIECES_MAX` of them to a message: so a message stays small, and each piece short enough
to be part of it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import msgpack

from asyncrpc.errors import MalformedError
from asyncrpc.ids import Incarnation
from asyncrpc.runtime.messages import Notice, message
from asyncrpc.runtime.rounds.machine.words import (
    MISSING_MAX,
    Doubt,
    Here,
    Key,
    Payloads,
    Replicas,
    Report,
    Result,
    RoundFailed,
    Word,
)
from asyncrpc.runtime.schema import Count, Number, Positive, Spread

SERVICE: Final = "rounds"
PAYLOAD_BYTES_MAX: Final = 1 << 20  # of one member
ROUND_BYTES_MAX: Final = 16 << 20  # of all: every member gets as much
TAG_CHARS_MAX: Final = 1024
PIECE_BYTES: Final = 16 << 10  # what a value holds inline; see `serde.encoding`
PIECES_MAX: Final = 16
PART_BYTES: Final = PIECE_BYTES * PIECES_MAX
# What msgpack adds to each payload, at most.
_PAYLOAD_OVERHEAD: Final = 5
PROBLEM_CHARS_MAX: Final = 4096  # of a failure


def payload_bytes_max(members: int) -> int:
    """Return how many bytes each of so many members may bring."""
    return min(PAYLOAD_BYTES_MAX, ROUND_BYTES_MAX // members)


@dataclass(frozen=True, slots=True)
class PayloadPart:
    """A part of the payloads of some members.

    Attributes:
        index: which part, from 0.
        parts: how many there are.
        pieces: of the payloads' msgpack; none if all payloads are empty.
    """

    index: Count
    parts: Positive
    pieces: list[bytes]


@message(SERVICE, "here")
class HereNotice(Notice):
    """What the sender knows."""

    key: Spread[Key]
    word: Spread[Here]


@message(SERVICE, "failed")
class FailedNotice(Notice):
    """A round has failed."""

    key: Spread[Key]
    word: Spread[RoundFailed]


@message(SERVICE, "doubt")
class DoubtNotice(Notice):
    """A member that is missed waits elsewhere."""

    key: Spread[Key]
    word: Spread[Doubt]


@message(SERVICE, "up")
class UpNotice(Notice):
    """A part of a report."""

    key: Spread[Key]
    number: Count
    passed: Number
    part: Spread[PayloadPart]


@message(SERVICE, "down")
class DownNotice(Notice):
    """A part of a result."""

    key: Spread[Key]
    number: Count
    part: Spread[PayloadPart]


@message(SERVICE, "left_out")
class LeftOutNotice(Notice):
    """The sender, which ends, goes on without the receiver, which it believes lost.

    Attributes:
        incarnation: of the receiver.
    """

    incarnation: Incarnation


PlainNotice = HereNotice | FailedNotice | DoubtNotice
PartNotice = UpNotice | DownNotice


# --- out -----------------------------------------------------------------------------


def notices(key: Key, word: Word, parts: list[PayloadPart]) -> Iterator[Notice]:
    """Yield the messages of a word.

    Args:
        key: of the series that it is about.
        word: what to say.
        parts: of a report or a result, what `pack` has made of its payloads.
    """
    match word:
        case Here():
            yield HereNotice(key, word)
        case RoundFailed():
            yield FailedNotice(key, word)
        case Doubt():
            yield DoubtNotice(key, word)
        case Report():
            for part in parts:
                yield UpNotice(key, word.number, word.passed, part)
        case Result():
            for part in parts:
                yield DownNotice(key, word.number, part)


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
    """Refuse members that are none.

    Args:
        replicas: ranks of the members.
        size: of the group.

    Raises:
        MalformedError: they are not of this group, or twice in it, or all of it.
    """
    if replicas is None:
        return
    ranks = set(replicas)
    if len(ranks) != len(replicas) or not ranks <= set(range(size)):
        raise MalformedError("replicas that are not of this group, or not once")
    if replicas == tuple(range(size)):
        raise MalformedError("replicas that are all: nil stands for these")


def check_word(word: Here | RoundFailed | Doubt, members: int, size: int) -> None:
    """Refuse a word that contradicts itself.

    Args:
        word: that has come.
        members: how many there are of the series.
        size: of the group.

    Raises:
        MalformedError: it makes no sense.
    """
    match word:
        case Here():
            is_right = word.known.bit_length() <= members and word.number <= word.latest
        case RoundFailed():
            failure = word.failure
            if failure.twin is not None:
                check_replicas(failure.twin.replicas, size)
            is_right = (
                len(failure.missing) <= MISSING_MAX
                and len(failure.problem) <= PROBLEM_CHARS_MAX
                and all(0 <= rank < size for rank in failure.missing)
            )
        case Doubt():
            check_replicas(word.elsewhere.replicas, size)
            is_right = 0 <= word.rank < size
    if not is_right:
        raise MalformedError("it contradicts itself")


def check_part(part: PayloadPart, members: int) -> None:
    """Refuse a part of payloads that are none.

    Args:
        part: that has come.
        members: of the series.

    Raises:
        MalformedError: it makes no sense.
    """
    most = members * (payload_bytes_max(members) + _PAYLOAD_OVERHEAD)
    if not (
        part.index < part.parts <= (most + _PAYLOAD_OVERHEAD) // PART_BYTES + 1
        and (part.pieces or part.parts == 1)
        and len(part.pieces) <= PIECES_MAX
        and all(len(one) <= PIECE_BYTES for one in part.pieces)
    ):
        raise MalformedError("payloads that cannot be put together")


@dataclass(slots=True)
class Arriving:
    """Payloads of which some parts have come: those of one neighbour, in order.

    Attributes:
        head: the word, its number, and how many parts there are.
        pieces: what has come.
        parts: how many parts that is.
    """

    head: tuple[type[PartNotice], int, int]
    pieces: list[bytes] = field(default_factory=list)
    parts: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes have come."""
        return sum(map(len, self.pieces))

    @property
    def is_whole(self) -> bool:
        """Whether all parts have come."""
        return self.parts == self.head[2]


def take_part(so_far: Arriving | None, notice: PartNotice) -> Arriving | None:
    """Take one part of payloads; None if those before it are not here.

    Args:
        so_far: those before it, if any.
        notice: that has come.
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
    """Return payloads that have come whole.

    Args:
        pieces: of them.
        members: whose payloads they are: how many.
        most_bytes: that each may have.

    Raises:
        MalformedError: they are none, or not so many.
    """
    if not pieces:
        return (b"",) * members
    try:
        payloads = msgpack.unpackb(b"".join(pieces), max_array_len=members)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"payloads that are no msgpack: {error}") from error
    if (
        type(payloads) is not list
        or len(payloads) != members
        or not all(type(one) is bytes and len(one) <= most_bytes for one in payloads)
    ):
        raise MalformedError("payloads that are none, too few, or too long")
    return tuple(payloads)
