"""The running collectives of a group at one rank, and the messages for them.

Collectives are matched by their numbers: the n-th that one rank begins belongs with the
n-th of every other.  A message names its collective, what its sender believes that to
be (a `Descriptor`), and its place among those of the sender.

    began here   not yet     the message is *early*: it is kept
                 yes         it is handed over, if both believe the same; else the
                             collective fails for both, who tell the others
                 is over     it is refused: the sender is late, or has failed

Invariants: a message is delivered once; a refused one is not kept; a failed collective
    stays failed, and nothing is kept for it.  The last `FAILURES_KEPT` failures are
    remembered, to be reported to latecomers.

Sans-IO; `M` is a message, which is not looked into.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from asyncrpc.errors import LocalProtocolError, MalformedError
from asyncrpc.runtime.schema import Number

M = TypeVar("M")

FAILURES_KEPT: Final = 64
# What the ranks of a group may be apart; those who are ahead wait for answers, so it is
# a few collectives for each that may be under way at once.
EARLY_MAX: Final = 1 << 16


class Descriptor(NamedTuple):
    """What a rank believes a collective to be.

    Attributes:
        operation: such as `all_reduce`.
        how: of a reduction, such as `sum`; else empty.
        dtype: of the tensor; empty if ranks may differ.
        shape: of the tensor; None if ranks may differ.
        root: the rank in the middle; -1 if there is none.
    """

    operation: str
    how: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    root: Number = -1

    def __str__(self) -> str:
        parts = []
        if self.dtype:
            parts.append(f" of {self.dtype.removeprefix('torch.')}")
        if self.shape is not None:
            parts.append(f", shape {self.shape}")
        if self.how:
            parts.append(f", by {self.how!r}")
        if self.root >= 0:
            parts.append(f"{',' if parts else ''} with root {self.root}")
        return self.operation + "".join(parts)


class CollectiveFailure(NamedTuple):
    """Why a collective has failed, as other ranks are told.

    Attributes:
        code: of the error's class.
        problem: for people.
        ranks: names of those to blame.
    """

    code: str
    problem: str
    ranks: tuple[str, ...]


class MessageKey(NamedTuple):
    """Identifies a message: the sender's rank, and its number among the sender's."""

    rank: int
    turn: int


class CollectiveState(enum.Enum):
    """Where one collective is, at one rank."""

    AHEAD = "it has not begun here: what comes for it is kept"
    DOOMED = "it has failed, and has not begun here"
    RUNNING = "it has begun here"
    FAILED = "it has begun here, and has failed"
    OVER = "it has ended here, well or not: what comes for it is refused"


class CollectiveEvent(enum.Enum):
    """What happens to one collective, at one rank."""

    BEGIN = "this rank begins it"
    FAIL = "it fails, here or at another rank"
    END = "this rank has ended it"


AHEAD, DOOMED, RUNNING, FAILED, OVER = CollectiveState
_E = CollectiveEvent

# What `Operations` does; it does not look it up, for every collective passes through.
TRANSITIONS: Final[
    Mapping[CollectiveState, Mapping[CollectiveEvent, CollectiveState]]
] = {
    AHEAD: {_E.BEGIN: RUNNING, _E.FAIL: DOOMED},
    DOOMED: {_E.BEGIN: FAILED, _E.FAIL: DOOMED},
    RUNNING: {_E.FAIL: FAILED, _E.END: OVER},
    FAILED: {_E.FAIL: FAILED, _E.END: OVER},
    OVER: {_E.FAIL: OVER},
}


def check(state: CollectiveState, event: CollectiveEvent) -> None:
    """Refuse what cannot happen.

    Raises:
        LocalProtocolError: the event cannot happen in this state.
    """
    if event not in TRANSITIONS[state]:
        raise LocalProtocolError(
            f"{event.value!r} cannot happen to a collective in the state {state.name}"
        )


@dataclass(slots=True)
class Operation(Generic[M]):
    """A collective that has begun here.

    Attributes:
        number: its number in the group.
        descriptor: what it is here.
        arrived: messages that have arrived and were not taken.
        failure: why it has failed; None if it has not.
    """

    number: int
    descriptor: Descriptor
    arrived: dict[MessageKey, M] = field(default_factory=dict)
    failure: CollectiveFailure | None = None


class Mismatch(NamedTuple):
    """Another rank believes a collective to be something else."""

    rank: int
    theirs: Descriptor
    ours: Descriptor


class Operations(Generic[M]):
    """The collectives of one rank in one group.

    Attributes:
        begun: how many collectives have begun here.
        running: the collectives that have not ended, by number.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.running: dict[int, Operation[M]] = {}
        self._early: dict[int, dict[MessageKey, M]] = {}
        self._said: dict[int, dict[int, Descriptor]] = {}  # by ranks that are ahead
        self._failed: OrderedDict[int, CollectiveFailure] = OrderedDict()
        self._kept = 0

    def begin(self, descriptor: Descriptor) -> tuple[Operation[M], Mismatch | None]:
        """Begin the next one; say whether another rank has begun something else."""
        operation: Operation[M] = Operation(self.begun, descriptor)
        self.begun += 1
        self.running[operation.number] = operation
        operation.arrived = self._early.pop(operation.number, {})
        self._kept -= len(operation.arrived)
        operation.failure = self._failed.get(operation.number)
        for rank, theirs in self._said.pop(operation.number, {}).items():
            if theirs != descriptor:
                return operation, Mismatch(rank, theirs, descriptor)
        return operation, None

    def hear(self, number: int, rank: int, theirs: Descriptor) -> Mismatch | None:
        """Record what another rank believes a collective to be; return a mismatch."""
        operation = self.running.get(number)
        if operation is not None:
            if operation.descriptor != theirs:
                return Mismatch(rank, theirs, operation.descriptor)
        elif number >= self.begun and number not in self._failed:
            self._check_early(number, self._kept)
            self._said.setdefault(number, {})[rank] = theirs
        return None

    def arrive(self, number: int, place: MessageKey, message: M) -> Operation[M] | None:
        """Take a message; return the collective that may wait for it.

        Raises:
            MalformedError: there is such a message already, or too many came early.
        """
        operation = self.running.get(number)
        if operation is not None:
            arrived = operation.arrived
        else:
            self._check_early(number, self._kept)
            arrived = self._early.setdefault(number, {})
            self._kept += 1
        if place in arrived:
            raise MalformedError(f"message {place} of collective {number} came twice")
        arrived[place] = message
        return operation

    def state(self, number: int) -> CollectiveState:
        """Return where a collective is."""
        operation = self.running.get(number)
        if operation is not None:
            return RUNNING if operation.failure is None else FAILED
        if number < self.begun:
            return OVER
        return DOOMED if number in self._failed else AHEAD

    def failure_of(self, number: int) -> CollectiveFailure | None:
        """Say why a collective has failed; None: it has not, or long ago."""
        return self._failed.get(number)

    def is_over(self, number: int) -> bool:
        """Return whether a collective has ended here, well or not."""
        return number < self.begun and number not in self.running

    def fail(self, number: int, failure: CollectiveFailure) -> Sequence[M]:
        """Let a collective fail; return the messages that no longer wait for it.

        Raises:
            MalformedError: it is too far ahead for any rank to have reached it.
        """
        if number not in self._failed:
            self._check_early(number)
            self._failed[number] = failure
            if len(self._failed) > FAILURES_KEPT:
                self._failed.popitem(last=False)
        self._said.pop(number, None)
        left = self._early.pop(number, {})
        self._kept -= len(left)
        operation = self.running.get(number)
        if operation is not None:
            operation.failure = operation.failure or failure
            left |= operation.arrived
            operation.arrived = {}
        return list(left.values())

    def end(self, operation: Operation[M]) -> None:
        """Forget a collective that has ended here, well or not.

        Raises:
            LocalProtocolError: it has ended before.  Nothing changed.
        """
        if self.running.pop(operation.number, None) is None:
            check(OVER, CollectiveEvent.END)

    def drop(self, rank: int) -> Sequence[M]:
        """Forget what a rank has sent and said early; return its messages."""
        for said in self._said.values():
            said.pop(rank, None)
        dropped: list[M] = []
        for arrived in self._early.values():
            for place in [one for one in arrived if one.rank == rank]:
                dropped.append(arrived.pop(place))
                self._kept -= 1
        return dropped

    def numbers(self) -> set[int]:
        """Return the collectives that something is known of and that are not over."""
        return {*self.running, *self._early, *self._said}

    def _check_early(self, number: int, kept: int = 0) -> None:
        if kept >= EARLY_MAX or number - self.begun >= EARLY_MAX:
            raise MalformedError(
                f"collective {number} is too far ahead: only {self.begun} have begun"
            )
