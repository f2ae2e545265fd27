"""Members that come to rounds: their programs, their messages, and what goes wrong.

Each member has its `SeriesTable`, and a program: the calls that it makes, in order.
Links are queues, in order, of messages, and at last the news that the other end is
gone.  A member that speaks to a dead one without a link gets that news as well.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from asyncrpc.core.barriers.machine.series import Series
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.messages import (
    Blame,
    Failure,
    Key,
    Purpose,
    Replicas,
    SeriesNotice,
)
from tests.inner_state import series_of

Call: TypeAlias = Key
Step: TypeAlias = tuple[str, int, int]
Message: TypeAlias = SeriesNotice | None  # None: the sender is gone
ROUNDS_MAX = 100  # of silence; more are a conversation without end


class Passed(NamedTuple):
    """The round that a member has passed, and whether a member had set a mark."""

    number: int
    is_marked: bool


def sets_mark(rank: int, number: int) -> bool:
    return rank == number + 2


def call(tag: str, replicas: Replicas = None) -> Call:
    return Key(Purpose.RENDEZVOUS, tag, replicas)


def name_of(rank: int) -> str:
    return "abcdefghijklmnopqrstuvwxyz"[rank] if rank < 26 else f"rank {rank}"


def gave_up(rank: int) -> Failure:
    return Failure(Blame.GAVE_UP, f"{name_of(rank)} gave up", (rank,))


def lost(rank: int) -> Failure:
    return Failure(Blame.LOST, f"{name_of(rank)} is gone", (rank,))


@dataclass
class Member:
    """One worker, and how its calls have ended, by their place in its program."""

    machine: SeriesTable
    program: list[Call]
    begun: int = 0
    calls: dict[int, Series] = field(default_factory=dict)  # under way
    ends: dict[int, Passed | Failure] = field(default_factory=dict)
    is_dead: bool = False


class World:
    """All members, and what is on its way between them."""

    def __init__(
        self,
        programs: Sequence[Sequence[Call]],
        *,
        at_once: int = 1,
        give_ups: int = 0,
        deaths: int = 0,
        ticks: int = 0,
    ) -> None:
        self.size = len(programs)
        self.at_once = at_once  # calls of a member
        self.members = [
            Member(SeriesTable(rank, self.size, name_of), list(program))
            for rank, program in enumerate(programs)
        ]
        self.links: dict[tuple[int, int], list[Message]] = {}  # without empty ones
        self.connected: dict[tuple[int, int], None] = {}
        self.budgets = {"give up": give_ups, "die": deaths, "tick": ticks}
        self.messages = self.restarts = 0
        self.passed: dict[Key, int] = {}  # by any member

    # --- what can happen -------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield all that can happen now."""
        for rank, member in enumerate(self.members):
            if member.is_dead:
                continue
            if self._may_come(member):
                yield "come", rank, 0
            if member.calls and self.budgets["give up"]:
                yield "give up", rank, 0
            if self.budgets["tick"] and self.overdue(rank):
                yield "tick", rank, 0
            if self.budgets["die"]:
                yield "die", rank, 0
        for from_, to in self.links:
            yield "deliver", from_, to

    def take(self, step: Step) -> None:
        kind, rank, to = step
        if kind in self.budgets:
            self.budgets[kind] -= 1
        if kind == "come":
            self.join(rank)
        elif kind == "give up":
            self.give_up(rank)
        elif kind == "tick":
            self.tick(rank)
        elif kind == "die":
            self.die(rank)
        else:
            self.deliver(rank, to)

    def play(self, choices: random.Random) -> None:
        """Let everything happen that can, in any order, then all that must."""
        while steps := list(self.steps()):
            self.take(choices.choice(steps))
        self.settle()

    def settle(self) -> None:
        """Let all come, and hear, until silence brings nothing new."""
        for _ in range(ROUNDS_MAX):
            self.deliver_all()
            ticking = [rank for rank in range(self.size) if self.overdue(rank)]
            for rank in ticking:
                self.tick(rank)
            if not ticking:
                return
        raise AssertionError("they tell each other the same for ever")

    def deliver_all(self) -> None:
        while moves := [
            step for step in self.steps() if step[0] in {"come", "deliver"}
        ]:
            for step in moves:
                self.take(step)

    def overdue(self, rank: int) -> list[tuple[Series, int]]:
        calls = self.members[rank].calls.values()
        return [(series, to) for series in calls for to in series.overdue()]

    # --- each of these ---------------------------------------------------------------

    def _may_come(self, member: Member) -> bool:
        if member.begun == len(member.program) or len(member.calls) >= self.at_once:
            return False
        next_one = member.program[member.begun]  # calls of a series take turns
        return next_one not in [member.program[index] for index in member.calls]

    def join(self, rank: int) -> None:
        member = self.members[rank]
        series = member.machine.series(member.program[member.begun])
        member.calls[member.begun] = series
        member.begun += 1
        member.machine.join(series, is_marked=sets_mark(rank, series.number + 1))
        self._after(rank)

    def give_up(self, rank: int) -> None:
        for series in tuple(self.members[rank].calls.values()):
            series.fail(gave_up(rank))
        self._after(rank)

    def tick(self, rank: int) -> None:
        for series, to in self.overdue(rank):
            self._send(rank, series, to)
        self._after(rank)

    def die(self, rank: int) -> None:
        self.members[rank].is_dead = True
        self.members[rank].calls.clear()
        for pair in tuple(self.connected):
            if rank in pair:
                other = sum(pair) - rank
                self.links.pop((other, rank), None)
                self._break(rank, other)

    def restart(self, rank: int, program: Sequence[Call]) -> None:
        """Let a member die, and begin a new life that knows nothing."""
        self.die(rank)
        self.restarts += 1
        machine = SeriesTable(rank, self.size, name_of)
        self.members[rank] = Member(machine, list(program))

    def deliver(self, from_: int, to: int) -> None:
        queue = self.links[from_, to]
        item = queue.pop(0)
        if not queue:
            del self.links[from_, to]
        machine = self.members[to].machine
        if item is None:
            for series in series_of(machine):
                series.on_lost(from_, lost(from_))
        else:
            machine.receive(from_, item)
        self._after(to)

    # --- parts of these --------------------------------------------------------------

    def _break(self, rank: int, to: int) -> None:
        if not self._is_broken(rank, to) and not self.members[to].is_dead:
            self.links.setdefault((rank, to), []).append(None)

    def _is_broken(self, rank: int, to: int) -> bool:
        return None in self.links.get((rank, to), ())

    def _after(self, rank: int) -> None:
        member = self.members[rank]
        for index, series in tuple(member.calls.items()):
            if not series.is_waiting:
                del member.calls[index]
                passed = Passed(series.number, series.is_marked)
                member.ends[index] = series.failure or passed
                if series.has_passed and not self.restarts:
                    self._check(series)
                series.let_go()
        for series, to in member.machine.due():
            self._send(rank, series, to)

    def _check(self, series: Series) -> None:
        """See that all have come to a round that is passed, and whose marks it has."""
        if self.passed.get(series.key, -1) < series.number:  # the first that passes it
            self.passed[series.key] = series.number
            for rank in series.ranks:
                theirs = series_of(self.members[rank].machine)
                numbers = [
                    series_there.number
                    for series_there in theirs
                    if series_there.key == series.key
                ]
                assert max(numbers, default=-1) >= series.number, f"{rank} is away"
        marks = (sets_mark(rank, series.number) for rank in series.ranks)
        assert series.is_marked == any(marks)

    def _send(self, rank: int, series: Series, to: int) -> None:
        assert to in series.neighbours
        messages = series.notices_for(to)
        self.messages += len(messages)
        if self.members[to].is_dead:
            self._break(to, rank)
        elif not self._is_broken(to, rank):  # else it is said to the former life
            self.connected[min(rank, to), max(rank, to)] = None
            queue = self.links.setdefault((rank, to), [])
            queue += messages


def explore(world: World, check: Callable[[World], None]) -> int:
    """Try every order of everything; check each end.  Return how many there are."""
    begin = pickle.dumps(world)
    seen, ends = {begin}, 0
    todo: list[tuple[bytes, tuple[Step, ...]]] = [(begin, ())]
    while todo:
        state, path = todo.pop()
        current: World = pickle.loads(state)
        steps = list(current.steps())
        try:
            if not any(step[0] in {"come", "deliver"} for step in steps):
                ends += 1
                current.settle()
                check(current)
            for step in steps:
                after: World = pickle.loads(state)
                after.take(step)
                after.messages = 0  # the same can follow, however many there were
                reached = pickle.dumps(after)
                if reached not in seen:
                    seen.add(reached)
                    todo.append((reached, (*path, step)))
        except Exception as error:
            error.add_note(f"after {path}")
            raise
    return ends
