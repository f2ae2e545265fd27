"""Two ranks of a group that begin collectives, and the network between them.

Each rank begins one collective after the other, as its program says, and leaves the
group then, or before.  In a collective it sends one message and takes one.  Messages
between the two come in order; what each rank does comes at any time.

Safety: no collective ends well at a rank if the other one has begun something else.
Liveness: none waits for ever.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, TypeAlias

from asyncrpc.parallel.collectives.machine.operations import (
    CollectiveFailure,
    Descriptor,
    MessageKey,
)
from tests.property.machines.walk import facts, visit_all

NAMES: Final = ("a", "b")
Action: TypeAlias = tuple[str, int]


@dataclass(slots=True)
class _Rank:
    """One of the two."""

    machine: Any
    program: str  # a letter for what each collective is
    may_leave_early: bool
    inbox: deque[tuple[Any, ...]] = field(default_factory=deque)
    number: int = -1  # of the collective under way
    has_taken: bool = False
    is_answered: bool = False
    has_left: bool = False
    results: list[bool] = field(default_factory=list)

    def facts(self) -> object:
        """Return everything that is so at this rank."""
        return (
            facts(vars(self.machine)),
            list(self.inbox),
            (self.number, self.has_taken, self.is_answered, self.has_left),
            self.results,
        )

    @property
    def operation(self) -> Any:
        """The collective under way, if one is."""
        return self.machine.operations.running.get(self.number)


class CollectivesWorld:
    """Both ranks after some actions."""

    def __init__(
        self, build: ModuleType, programs: tuple[str, str], *, leaves: int | None
    ) -> None:
        self.ranks: list[_Rank] = []
        for rank, program in enumerate(programs):
            machine = build.MatchedCollectives()
            machine.join("a group", NAMES, rank)
            self.ranks.append(_Rank(machine, program, rank == leaves))

    def facts(self) -> str:
        """Return everything that is so, to tell worlds apart."""
        return repr([rank.facts() for rank in self.ranks])

    def possible(self) -> Iterator[Action]:
        """Yield what may happen next."""
        for rank, member in enumerate(self.ranks):
            operation = member.operation
            is_free = operation is None and not member.has_left
            has_more = len(member.results) < len(member.program)
            may: dict[str, object] = {
                "deliver": member.inbox,
                "begin": is_free and has_more,
                "leave": (is_free and not has_more)
                or (member.may_leave_early and not member.has_left),
                "take": operation is not None
                and not operation.failure
                and not member.has_taken
                and operation.arrived,
                "end": operation is not None
                and (operation.failure or (member.has_taken and member.is_answered)),
            }
            yield from ((what, rank) for what, can_be in may.items() if can_be)

    def do(self, action: Action) -> None:
        """Let something happen."""
        what, rank = action
        getattr(self, f"_{what}")(rank, self.ranks[rank])
        for member, rank_of in zip(self.ranks, (0, 1), strict=True):
            self._carry_out(rank_of, member)

    def _carry_out(self, rank: int, member: _Rank) -> None:
        outbox = member.machine.outbox
        while outbox:
            failing = outbox.pop(0)
            for number in failing.messages:
                self._send(rank, "answer", number, failing.failure)
            if failing.is_news:
                self._send(rank, "failed", failing.number, failing.failure)

    def _send(self, rank: int, *message: Any) -> None:
        self.ranks[1 - rank].inbox.append(message)

    # --- what a rank does ------------------------------------------------------------

    def _begin(self, rank: int, member: _Rank) -> None:
        descriptor = Descriptor(member.program[len(member.results)])
        operation = member.machine.begin(descriptor)
        if isinstance(operation, CollectiveFailure):
            member.results.append(False)
            return
        member.number = operation.number
        member.has_taken = member.is_answered = False
        self._send(rank, "block", operation.number, descriptor)

    def _take(self, rank: int, member: _Rank) -> None:
        ((_, number),) = member.operation.arrived.items()
        member.operation.arrived.clear()
        member.has_taken = True
        self._send(rank, "answer", number, None)

    def _end(self, rank: int, member: _Rank) -> None:
        operation = member.operation
        member.results.append(operation.failure is None)
        member.machine.operations.end(operation)
        for number in operation.arrived.values():
            self._send(
                rank, "answer", number, member.machine.too_late(number, 1 - rank)
            )

    def _leave(self, rank: int, member: _Rank) -> None:
        member.has_left = True
        self._send(rank, "left", *member.machine.leave("has closed"))

    # --- what comes ------------------------------------------------------------------

    def _deliver(self, rank: int, member: _Rank) -> None:
        machine = member.machine
        match member.inbox.popleft():
            case ("block", number, descriptor):
                failure = machine.refusal_of(number, 1 - rank, descriptor)
                if failure is not None:
                    self._send(rank, "answer", number, failure)
                else:
                    machine.operations.arrive(number, MessageKey(1 - rank, 0), number)
            case ("answer", number, failure):
                if number == member.number:
                    member.is_answered = True
                if failure is not None and member.operation is not None:
                    self._on_refused(member, number, failure)
            case ("failed", number, failure):
                machine.receive_failure(number, failure)
            case ("left", ended, failure):
                machine.lose(failure, ended=ended)

    @staticmethod
    def _on_refused(member: _Rank, number: int, failure: CollectiveFailure) -> None:
        if number == member.number and member.operation.failure is None:
            member.machine.fail(number, failure)

    # --- the end ---------------------------------------------------------------------

    def check(self) -> None:
        """Check what must be so at any time."""
        a, b = self.ranks
        for number, (mine, theirs) in enumerate(
            zip(a.results, b.results, strict=False)
        ):
            is_same = a.program[number] == b.program[number]
            assert is_same or not (mine or theirs), (
                f"collective {number} has ended well"
            )

    def check_end(self) -> None:
        """Check what must be so when nothing is left to happen."""
        for member in self.ranks:
            assert member.operation is None, f"{member.program} waits for ever"
            assert member.has_left


def visit(build: ModuleType, programs: tuple[str, str], *, leaves: int | None) -> int:
    """Visit all worlds; return how many there were."""

    def look(world: CollectivesWorld, possible: list[Action]) -> None:
        world.check()
        if not possible:
            world.check_end()

    return visit_all(lambda: CollectivesWorld(build, programs, leaves=leaves), look)
