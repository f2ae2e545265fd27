"""Records of workers, and what is to be done once one has changed."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TypeAlias

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member


class Status(enum.IntEnum):
    """Whether a worker is there; of two records of one version, the higher counts."""

    ALIVE = 0
    LOST = 1
    LEFT = 2


class ChangeKind(enum.StrEnum):
    """How a member has changed."""

    JOINED = "joined"
    LEFT = "left"  # it announced its end
    LOST = "lost"  # it died, or cannot be reached
    RESTARTED = "restarted"  # another process has its name
    BACK = "back"  # it was declared lost, and answers again
    RESYNC = "resync"  # changes were missed: see `Worker.known_members`


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of one worker.

    Attributes:
        member: its name, rank and addresses.
        generation: which life of the name this is, from 1; 0: not known yet.
        version: how often the worker has refuted its own death.
    """

    member: Member
    generation: int = 0
    version: int = 0
    status: Status = Status.ALIVE

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.member.name

    @property
    def incarnation(self) -> Incarnation:
        """The worker's incarnation."""
        return self.member.incarnation

    @property
    def order(self) -> tuple[int, int, int, int]:
        """Return a key by which the later one of two records of a name is greater."""
        return self.generation, self.incarnation, self.version, self.status

    @property
    def is_alive(self) -> bool:
        """Return whether the worker is there."""
        return self.status is Status.ALIVE

    @property
    def is_placed(self) -> bool:
        """Return whether it has a place on the ring: not while it is only listed."""
        return self.is_alive and self.member.incarnation != UNKNOWN_INCARNATION


# --- effects -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Changed:
    """Effect: a member has changed.

    Attributes:
        kind: how; None if only its addresses or its incarnation have become known.
        record: its present record.
        previous: the incarnation that it had before; 0 if none was known.
        is_doubted: whether the former incarnation may not have ended: a `Doubt` of it
            follows.
    """

    kind: ChangeKind | None
    record: Record
    previous: Incarnation
    is_doubted: bool = False


@dataclass(frozen=True, slots=True)
class Announce:
    """Effect: inform all members; this worker is the first to say so."""

    record: Record


@dataclass(frozen=True, slots=True)
class Reply:
    """Effect: inform the worker that the event came from."""

    record: Record


@dataclass(frozen=True, slots=True)
class Warn:
    """Effect: tell the worker that the record is about: others hold it to be lost."""

    record: Record


@dataclass(frozen=True, slots=True)
class Contest:
    """Effect: find out whether the later worker with this one's name lives.

    If it does, all members refuse this one; if not, `outlive` it.
    """

    record: Record


@dataclass(frozen=True, slots=True)
class Doubt:
    """Effect: find out whether a life that is said to have ended still answers.

    If it does, tell it what is said of it; it knows better.  If not, it has ended.
    """

    member: Member


@dataclass(frozen=True, slots=True)
class Settle:
    """Effect: find out which of two lives of a name answers.

    A link to the present life is kept while that life answers, and while the later one
    does not.
    """

    present: Record
    later: Record


@dataclass(frozen=True, slots=True)
class Forgotten:
    """Effect: a worker that was never met is forgotten; others need the room."""

    name: str


Effect: TypeAlias = (
    Changed | Announce | Reply | Warn | Contest | Doubt | Settle | Forgotten
)
