"""How the messages of a meeting travel: notices of the service `meetings`.

Payloads go in pieces of `PIECE_BYTES`, `PIECES_MAX` of them to a message: so a message
stays small, and each piece short enough to be part of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from asyncrpc.errors import MalformedError
from asyncrpc.runtime.machine.series import (
    Blame,
    Doubt,
    Failed,
    Failure,
    Here,
    Payloads,
    Replicas,
    Report,
    Result,
    Turn,
    Word,
)

PAYLOAD_BYTES_MAX: Final = 1 << 20  # of one member
MEETING_BYTES_MAX: Final = 16 << 20  # of all: every member gets as much
TAG_CHARS_MAX: Final = 1024
PIECE_BYTES: Final = 16 << 10  # what a value holds inline; see `serde.encoding`
PIECES_MAX: Final = 16
PART_BYTES: Final = PIECE_BYTES * PIECES_MAX
# What msgpack adds to each payload, at most.
_PAYLOAD_OVERHEAD: Final = 5
_NUMBER_MAX: Final = 1 << 62
_TEXT_CHARS_MAX: Final = 4096
_NAMES_MAX: Final = 64


def payload_bytes_max(members: int) -> int:
    """Return how many bytes each of so many members may bring."""
    return min(PAYLOAD_BYTES_MAX, MEETING_BYTES_MAX // members)


# --- out -----------------------------------------------------------------------------


def messages_for(
    word: Word, packed: Sequence[list[bytes]] = ()
) -> Iterator[tuple[str, list[Any]]]:
    """Yield the messages of a word: method, and what follows tag and replicas.

    Args:
        word: what to say.
        packed: of a report or a result, what `pack` has made of its payloads.
    """
    match word:
        case Here():
            known = word.known.to_bytes((word.known.bit_length() + 7) // 8, "little")
            yield "here", [*word[:4], known]
        case Report():
            for index, pieces in enumerate(packed):
                yield "up", [word.number, word.passed, index, len(packed), pieces]
        case Result():
            for index, pieces in enumerate(packed):
                yield "down", [word.number, index, len(packed), pieces]
        case Failed():
            failure = word.failure
            twin = None if failure.twin is None else _packed_turn(failure.twin)
            about = [failure.blame.name, failure.problem, list(failure.missing), twin]
            yield "failed", [word.number, word.passed, about]
        case Doubt():
            yield "doubt", [word.number, word.rank, _packed_turn(word.elsewhere)]


def pack(payloads: Payloads) -> list[list[bytes]]:
    """Return payloads as parts, each a list of pieces."""
    blob: bytes = msgpack.packb(payloads)
    view = memoryview(blob)
    parts = []
    for start in range(0, len(blob), PART_BYTES):
        end = min(start + PART_BYTES, len(blob))
        edges = range(start, end, PIECE_BYTES)
        parts.append([bytes(view[at : min(at + PIECE_BYTES, end)]) for at in edges])
    return parts


def _packed_turn(turn: Turn) -> list[Any]:
    return [None if turn.replicas is None else list(turn.replicas), turn.number]


# --- in ------------------------------------------------------------------------------


@dataclass(slots=True)
class Arriving:
    """Payloads of which some parts have come.

    Attributes:
        head: method, number, and how many parts there are.
        pieces: what has come.
        parts: how many parts that is.
    """

    head: tuple[str, int, int]
    pieces: list[bytes]
    parts: int = 0

    @property
    def nbytes(self) -> int:
        """How many bytes have come."""
        return sum(map(len, self.pieces))


class Reader:
    """Reads the words of one worker's neighbours.

    Words that come in parts are put together here: those of one neighbour follow each
    other.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def replicas(self, value: Any, *, with_me: bool = True) -> Replicas:
        """Read who takes part.

        Raises:
            MalformedError: it is nobody, or not this worker, or makes no sense.
        """
        if value is None:
            return None
        if type(value) is not list or not all(type(rank) is int for rank in value):
            raise MalformedError("replicas that are no ranks")
        found = tuple(value)
        ranks = set(found)
        if len(ranks) != len(found) or not ranks <= set(range(self._size)):
            raise MalformedError("replicas that are not of this group, or not once")
        if found == tuple(range(self._size)) or (with_me and self._rank not in ranks):
            raise MalformedError("replicas that are all, or not this worker")
        return found

    @staticmethod
    def passed(value: list[Any]) -> int:
        """Take out of a report the last meeting that its sender knows to be passed.

        Raises:
            MalformedError: it does not say that.
        """
        if len(value) < 2 or type(value[1]) is not int:  # noqa: PLR2004
            raise MalformedError("a report of a rendezvous that cannot be read")
        passed: int = value.pop(1)
        _check(passed)
        return passed

    def plain_word(self, method: str, value: list[Any], count: int) -> Word:
        """Read a word that comes in one message.

        Args:
            method: of the message.
            value: what follows tag and replicas.
            count: how many members there are.

        Raises:
            MalformedError: it makes no sense.
        """
        match method, value:
            case "here", [int(number), int(passed), bool(waits), int(latest), bytes()]:
                known = int.from_bytes(value[4], "little")
                _check(number, passed, latest)
                if known.bit_length() <= count and number <= latest:
                    return Here(number, passed, waits, latest, known)
            case "failed", [int(number), int(passed), [*about]]:
                _check(number, passed)
                return Failed(number, passed, self._failure(about))
            case "doubt", [int(number), int(rank), [*turn]]:
                _check(number, rank)
                return Doubt(number, rank, self._turn(turn))
        raise MalformedError(f"a word {method!r} of a rendezvous that cannot be read")

    def _failure(self, about: list[Any]) -> Failure:
        match about:
            case [str(blame), str(problem), [*names], twin] if (
                blame in Blame.__members__
                and len(names) <= _NAMES_MAX
                and all(type(name) is str for name in names)
            ):
                turn = None if twin is None else self._turn(twin)
                problem = problem[:_TEXT_CHARS_MAX]
                return Failure(Blame[blame], problem, tuple(names), turn)
        raise MalformedError("a failure of a rendezvous that cannot be read")

    def _turn(self, value: Any) -> Turn:
        match value:
            case [replicas, int(number)]:
                _check(number)
                return Turn(self.replicas(replicas, with_me=False), number)
        raise MalformedError("a meeting that cannot be read")


def take_part(
    so_far: Arriving | None, method: str, value: list[Any], count: int
) -> Arriving | None:
    """Take one part of payloads; None if those before it are not here.

    Args:
        so_far: those before it, if any.
        method: of the message.
        value: number, parts before this one, parts in all, pieces.
        count: how many members there are.

    Raises:
        MalformedError: it makes no sense.
    """
    most = count * (payload_bytes_max(count) + _PAYLOAD_OVERHEAD) + _PAYLOAD_OVERHEAD
    match value:
        case [int(number), int(index), int(parts), [*pieces]] if (
            0 <= index < parts <= most // PART_BYTES + 1
            and 0 < len(pieces) <= PIECES_MAX
            and all(type(one) is bytes and len(one) <= PIECE_BYTES for one in pieces)
        ):
            _check(number)
            head = method, number, parts
            if not index:
                so_far = Arriving(head, [])
            if so_far is not None and so_far.head == head and so_far.parts == index:
                so_far.pieces += pieces
                so_far.parts += 1
                return so_far
            return None
    raise MalformedError("payloads of a rendezvous that cannot be put together")


def unpack(arrived: Arriving, count: int) -> Payloads:
    """Return payloads that have come whole.

    Args:
        arrived: their parts.
        count: how many members there are in all.

    Raises:
        MalformedError: they are none.
    """
    most = payload_bytes_max(count)
    try:
        payloads = msgpack.unpackb(b"".join(arrived.pieces), max_array_len=count)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"payloads that are no msgpack: {error}") from error
    if type(payloads) is not list or not all(
        type(one) is bytes and len(one) <= most for one in payloads
    ):
        raise MalformedError("payloads of a rendezvous that are none, or too long")
    return tuple(payloads)


def _check(*numbers: int) -> None:
    for number in numbers:
        if not -1 <= number < _NUMBER_MAX:
            raise MalformedError(f"{number} is no number of a rendezvous")
