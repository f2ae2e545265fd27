"""The running collectives of a group at one rank, and the messages for them.

Collectives are matched by their numbers: the n-th that one rank begins belongs with the
n-th of every other.  A message names its collective, the sender's description of it (a
`Descriptor`), and its number among the messages of the sender.

    began here   not yet     the message is *early*: it is kept
                 yes         the message is delivered if the descriptors are equal; else
                             the collective fails on both ranks, which tell the others
                 is over     the message is refused: the sender is late, or has failed

Invariants: a message is delivered once; a refused message is not kept; a failed
    collective stays failed, and no message is kept for it.  The last `FAILURES_KEPT`
    failures are remembered, to be reported to late ranks.

Sans-IO; `M` is a message, opaque here.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Generic, NamedTuple, TypeVar

from asyncrpc.core.services.schema import Number
from asyncrpc.core.state_table import StateTable
from asyncrpc.errors import MalformedError

M = TypeVar("M")

FAILURES_KEPT: Final = 64
# How far ahead a rank may be, in collectives and in messages.  A rank that is ahead
# waits for answers, so in practice it is a few for each concurrent collective.
EARLY_MAX: Final = 1 << 16


class Descriptor(NamedTuple):
    """A rank's description of a collective.

    Attributes:
        operation: the operation, such as `all_reduce`.
        how: the reduction, such as `sum`; empty without one.
        dtype: the dtype of the tensor; empty if ranks may differ.
        shape: the shape of the tensor; None if ranks may differ.
        root: the root's rank; -1 without a root.
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
    """The failure of a collective, as it is sent to other ranks.

    Attributes:
        code: the code of the error's class.
        problem: the description, for people.
        ranks: the names of the workers at fault.
    """

    code: str
    problem: str
    ranks: tuple[str, ...]


class MessageKey(NamedTuple):
    """Identifies a message: the sender's rank, and its number among the sender's."""

    rank: int
    turn: int


class CollectiveState(enum.Enum):
    """The state of one collective at one rank."""

    AHEAD = "this rank has not begun the collective: messages for it are kept"
    DOOMED = "the collective has failed, and this rank has not begun it"
    RUNNING = "this rank has begun the collective"
    FAILED = "this rank has begun the collective, which has failed"
    OVER = "this rank has ended the collective: messages for it are refused"


class CollectiveEvent(enum.Enum):
    """An event of one collective at one rank."""

    BEGIN = "this rank begins the collective"
    FAIL = "the collective fails, here or at another rank"
    END = "this rank has ended the collective"


AHEAD, DOOMED, RUNNING, FAILED, OVER = CollectiveState
_E = CollectiveEvent

# The transitions of `Operations`, which does not look them up, to save time.
TRANSITIONS: Final = StateTable(
    "a collective",
    {
        AHEAD: {_E.BEGIN: RUNNING, _E.FAIL: DOOMED},
        DOOMED: {_E.BEGIN: FAILED, _E.FAIL: DOOMED},
        RUNNING: {_E.FAIL: FAILED, _E.END: OVER},
        FAILED: {_E.FAIL: FAILED, _E.END: OVER},
        OVER: {_E.FAIL: OVER},
    },
)


@dataclass(slots=True)
class Operation(Generic[M]):
    """A collective that has begun here.

    Attributes:
        number: the number of the collective in the group.
        descriptor: this rank's description of it.
        arrived: messages that have arrived and were not taken.
        failure: its failure; None if it has not failed.
    """

    number: int
    descriptor: Descriptor
    arrived: dict[MessageKey, M] = field(default_factory=dict)
    failure: CollectiveFailure | None = None


class Mismatch(NamedTuple):
    """Another rank has a different description of a collective."""

    rank: int
    theirs: Descriptor
    ours: Descriptor


class Operations(Generic[M]):
    """The collectives of one rank in one group.

    Attributes:
        running: the collectives that have not ended, by number.
    """

    def __init__(self) -> None:
        self.begun = 0
        self.running: dict[int, Operation[M]] = {}
        self._early: dict[int, dict[MessageKey, M]] = {}
        self._reported: dict[int, dict[int, Descriptor]] = {}  # by ranks that are ahead
        self._failed: OrderedDict[int, CollectiveFailure] = OrderedDict()
        self._kept = 0

    def begin(self, descriptor: Descriptor) -> tuple[Operation[M], Mismatch | None]:
        """Begin the next collective; return a mismatch with another rank's report."""
        operation: Operation[M] = Operation(self.begun, descriptor)
        self.begun += 1
        self.running[operation.number] = operation
        operation.arrived = self._early.pop(operation.number, {})
        self._kept -= len(operation.arrived)
        operation.failure = self._failed.get(operation.number)
        for rank, theirs in self._reported.pop(operation.number, {}).items():
            if theirs != descriptor:
                return operation, Mismatch(rank, theirs, descriptor)
        return operation, None

    def receive(self, number: int, rank: int, theirs: Descriptor) -> Mismatch | None:
        """Record another rank's description of a collective; return a mismatch."""
        operation = self.running.get(number)
        if operation is not None:
            if operation.descriptor != theirs:
                return Mismatch(rank, theirs, operation.descriptor)
        elif number >= self.begun and number not in self._failed:
            self._check_early(number, self._kept)
            self._reported.setdefault(number, {})[rank] = theirs
        return None

    def arrive(self, number: int, place: MessageKey, message: M) -> Operation[M] | None:
        """Take a message; return the collective that may wait for it."""
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
        """Return the state of a collective."""
        operation = self.running.get(number)
        if operation is not None:
            return RUNNING if operation.failure is None else FAILED
        if number < self.begun:
            return OVER
        return DOOMED if number in self._failed else AHEAD

    def failure_of(self, number: int) -> CollectiveFailure | None:
        """Return the failure of a collective; None: not failed, or forgotten."""
        return self._failed.get(number)

    def is_over(self, number: int) -> bool:
        """Return whether a collective has ended here, well or not."""
        return number < self.begun and number not in self.running

    def fail(self, number: int, failure: CollectiveFailure) -> Sequence[M]:
        """Let a collective fail; return the messages that no longer wait for it."""
        if number not in self._failed:
            self._check_early(number)
            self._failed[number] = failure
            if len(self._failed) > FAILURES_KEPT:
                self._failed.popitem(last=False)
        self._reported.pop(number, None)
        messages = self._early.pop(number, {})
        self._kept -= len(messages)
        operation = self.running.get(number)
        if operation is not None:
            operation.failure = operation.failure or failure
            messages |= operation.arrived
            operation.arrived = {}
        return list(messages.values())

    def end(self, operation: Operation[M]) -> None:
        """Forget a collective that has ended here, well or not."""
        if self.running.pop(operation.number, None) is None:
            raise TRANSITIONS.refusal(OVER, CollectiveEvent.END)

    def numbers(self) -> set[int]:
        """Return the numbers of known collectives that are not over."""
        return {*self.running, *self._early, *self._reported}

    def _check_early(self, number: int, kept: int = 0) -> None:
        if kept >= EARLY_MAX or number - self.begun >= EARLY_MAX:
            raise MalformedError(
                f"collective {number} is too far ahead: only {self.begun} have begun"
            )
