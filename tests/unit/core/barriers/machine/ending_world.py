"""A group that ends: members that call each other, die and doubt one another.

Each member has its `SeriesTable` and its `Termination`; links are queues, in order, of
calls, answers, messages of waves, and at last the news that the other end is gone.  Who
speaks to somebody of whose end it has learnt gets that news again: a dial that fails.
One that has died may be restarted: it connects anew, and the membership tells each of
the others of it at some time.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncrpc.core.barriers.machine.series import Series
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.barriers.machine.termination import Phase, Termination
from asyncrpc.core.barriers.messages import SeriesNotice
from asyncrpc.core.services.schema import Notice
from tests.inner_state import series_of
from tests.unit.core.barriers.machine.world import lost, name_of

Link: TypeAlias = tuple[int, int]
Message: TypeAlias = tuple[str, *tuple[int, ...]] | SeriesNotice
Step: TypeAlias = tuple[str, *tuple[int, ...]]


@dataclass
class Member:
    """One worker: what is in flight at it, and its view of the end."""

    table: SeriesTable
    machine: Termination
    pending: list[int] = field(default_factory=list)  # to whom
    serving: list[tuple[int, int]] = field(default_factory=list)  # from whom, how deep
    started: int = 0
    has_left: bool = False
    is_dead: bool = False
    cut_off: set[int] = field(default_factory=set)  # of whose end it has learnt
    own_calls: int = 0  # that its program still makes before it asks for the end
    life: int = 1
    linked: dict[int, int] = field(default_factory=dict)  # lives that it speaks to
    news: list[tuple[int, int]] = field(default_factory=list)  # of lives, not heard yet

    @property
    def is_waiting(self) -> bool:
        """Whether it is at a wave."""
        return self.machine.series.is_waiting

    @property
    def is_here(self) -> bool:
        """Whether it takes part in anything."""
        return not (self.has_left or self.is_dead)


class World:
    """All members, and what is on its way between them."""

    def __init__(
        self,
        size: int,
        *,
        own_calls: int | list[int],
        depth: int,
        calls: int = 100,
        deaths: int = 0,
        doubts: int = 0,
        restarts: int = 0,
    ) -> None:
        if isinstance(own_calls, int):
            own_calls = [own_calls] * size
        self.size = size
        self.depth = depth  # of the chains of calls
        self.calls = calls  # in all
        self.deaths = deaths
        self.doubts = doubts
        self.restarts = restarts
        self.members = [
            Member(table, Termination(rank, size, table), own_calls=own_calls[rank])
            for rank, table in enumerate(
                SeriesTable(rank, size, name_of) for rank in range(size)
            )
        ]
        self.links: dict[Link, list[Message]] = {
            (rank, other): []
            for rank in range(size)
            for other in range(size)
            if rank != other
        }

    def copy(self) -> World:
        """Return a world of its own that goes on from here."""
        world: World = pickle.loads(pickle.dumps(self, 5))  # a third of deepcopy's time
        return world

    def key(self) -> bytes:
        """Return what tells this world from others that will go on differently."""
        return pickle.dumps(self, 5)

    # --- what may happen -------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield everything that may happen now."""
        for rank, member in enumerate(self.members):
            if member.is_here:
                yield from self._steps_of(rank, member)
                if member.news:
                    yield "hear", rank
            elif member.is_dead and self.restarts:
                yield from (("restart", rank, by) for by in self._hosts())
        for link, queue in self.links.items():
            if queue:
                yield "deliver", *link

    def _steps_of(self, rank: int, member: Member) -> Iterator[Step]:
        peers = [
            to for to in range(self.size) if to != rank and to not in member.cut_off
        ]
        if member.machine.phase is Phase.BEFORE:
            yield "enter", rank
            if member.own_calls and self.calls:
                yield from (("call", rank, to, -1) for to in peers)
        for index, (_, depth) in enumerate(member.serving):
            yield "answer", rank, index
            if depth < self.depth and self.calls:
                yield from (("call", rank, to, index) for to in peers)
        if member.machine.is_over:
            yield "leave", rank
        elif member.machine.phase is not Phase.BEFORE and not member.is_waiting:
            is_able = member.machine.is_first or not self.is_busy(rank)
            yield "speak" if is_able else "try_to_speak", rank
        if self.deaths:
            yield "die", rank
        if self.doubts:
            yield from (("doubt", rank, to) for to in peers)

    def _hosts(self) -> list[int]:
        """Return the members that would admit another life of a name."""
        members = enumerate(self.members)
        return [
            rank
            for rank, member in members
            if member.is_here and not member.machine.is_over
        ]

    def is_busy(self, rank: int) -> bool:
        """Whether it is at work, waits, or may hear from one that is left out."""
        member = self.members[rank]
        may_hear = member.machine.lost - member.cut_off
        return bool(member.pending or member.serving or may_hear)

    def take(self, step: Step) -> None:
        """Let it happen."""
        action: Callable[..., None] = getattr(self, f"_{step[0]}")
        action(*step[1:])
        for rank, member in enumerate(self.members):
            if member.is_here:
                self._go_on(rank)

    def be_silent(self) -> None:
        """Nothing has come for a while: all is told again."""
        for rank, member in enumerate(self.members):
            if member.is_here:
                series = member.machine.series
                for to in series.overdue():
                    self._say(rank, series, to)
                self._go_on(rank)

    # --- what happens ----------------------------------------------------------------

    def _enter(self, rank: int) -> None:
        self.members[rank].machine.enter()

    def _call(self, rank: int, to: int, index: int) -> None:
        member = self.members[rank]
        self.calls -= 1
        if index < 0:
            member.own_calls -= 1
        member.pending.append(to)
        member.started += 1
        depth = 0 if index < 0 else member.serving[index][1]
        self._send(rank, to, ("call", depth + 1))

    def _answer(self, rank: int, index: int) -> None:
        caller, _ = self.members[rank].serving.pop(index)
        self._send(rank, caller, ("answer",))

    def _speak(self, rank: int) -> None:
        member = self.members[rank]
        mark = member.machine.join(busy=self.is_busy(rank), started=member.started)
        if mark is not None:
            member.table.join(member.machine.series, is_marked=mark)

    def _try_to_speak(self, rank: int) -> None:
        self._speak(rank)  # it is busy: nothing may come of it

    def _leave(self, rank: int) -> None:
        self.members[rank].has_left = True
        self._hang_up(rank)

    def _die(self, rank: int) -> None:
        self.deaths -= 1
        self.members[rank].is_dead = True
        self._hang_up(rank)

    def _restart(self, rank: int, by: int) -> None:
        """Begin another life, which one of the others admits."""
        self.restarts -= 1
        life = self.members[rank].life + 1
        table = SeriesTable(rank, self.size, name_of)
        member = Member(table, Termination(rank, self.size, table), life=life)
        self.members[rank] = member
        for known, its in self.members[by].machine.lives.items():
            member.machine.on_life(known, its)
        member.machine.on_life(rank, life)
        missed = self.members[by].news  # comparing repairs that
        member.news += [news for news in missed if news[0] != rank]
        for to, other in enumerate(self.members):
            if to == rank:
                continue
            member.linked[to] = other.life
            self.links[to, rank][:] = [] if other.is_here else [("gone",)]
            if other.is_here:
                self.links[rank, to].append(("hello", life))
                other.news.append((rank, life))

    def _hear(self, rank: int) -> None:
        """The membership tells of a life; what concerned the former one has ended."""
        member = self.members[rank]
        to, life = member.news.pop(0)
        if member.linked.get(to, 1) < life:  # its connection has ended before
            queue = self.links[to, rank]
            while queue.pop(0) != ("hello", life):
                pass
            self._end_link(member, to)
            self._begin_link(member, to, life)
        member.machine.on_life(to, life)

    def _end_link(self, member: Member, to: int) -> None:
        member.cut_off.add(to)
        member.pending = [peer for peer in member.pending if peer != to]
        member.serving = [call for call in member.serving if call[0] != to]
        for series in series_of(member.table):
            series.on_lost(to, lost(to))
        member.machine.look()

    def _begin_link(self, member: Member, to: int, life: int) -> None:
        member.cut_off.discard(to)
        member.linked[to] = life

    def _doubt(self, rank: int, to: int) -> None:
        """The connection breaks, and what is on its way in it is lost."""
        self.doubts -= 1
        for sender, other in ((rank, to), (to, rank)):
            self.links[sender, other][:] = [("gone",)]

    def _hang_up(self, rank: int) -> None:
        for (sender, _other), queue in self.links.items():
            if sender == rank and queue[-1:] != [("gone",)]:
                queue.append(("gone",))

    def _deliver(self, from_: int, to: int) -> None:
        item = self.links[from_, to].pop(0)
        member = self.members[to]
        is_hello = isinstance(item, tuple) and item[0] == "hello"
        if not member.is_here or (from_ in member.cut_off and not is_hello):
            return
        match item:
            case ("hello", int(life)):
                self._begin_link(member, from_, life)
            case ("call", int(depth)):
                member.serving.append((from_, depth))
            case ("answer",):
                member.pending.remove(from_)
            case ("left out",):
                member.machine.on_left_out(from_)
            case ("gone",):
                self._end_link(member, from_)
            case Notice():
                member.table.receive(from_, item)
                member.machine.receive(item)

    def _go_on(self, rank: int) -> None:
        """Say what is due; check that an end that is seen is one."""
        member = self.members[rank]
        before = member.machine.phase
        for _ in range(100):
            due = member.table.due()
            for series, to in due:
                self._say(rank, series, to)
            if not due:
                break
        else:
            raise AssertionError("it never ends to say something")
        member.machine.look()
        for to in sorted(member.machine.untold):
            if member.linked.get(to, 1) == member.machine.lives.get(to, 1):
                self._send(rank, to, ("left out",))
        member.machine.untold.clear()
        if member.machine.phase is Phase.ENDED and before is not Phase.ENDED:
            assert self.in_flight() == [], f"{rank} saw an end too early"

    def in_flight(self) -> list[object]:
        """Return the calls of the group: of all but the dead and those left out."""
        left_out: set[int] = set()
        for member in self.members:
            if member.is_here and member.machine.phase is not Phase.EXCLUDED:
                left_out |= member.machine.lost
        group = [
            rank
            for rank, member in enumerate(self.members)
            if member.is_here and rank not in left_out
        ]
        remaining: list[object] = [
            (rank, member.pending, member.serving)
            for rank, member in enumerate(self.members)
            if rank in group and (member.pending or member.serving)
        ]
        remaining += [
            (link, message)
            for link, queue in self.links.items()
            for message in queue
            if isinstance(message, tuple) and message[0] == "call"
            if link[1] in group
            if link[0] not in self.members[link[1]].cut_off
        ]
        return remaining

    # --- messages --------------------------------------------------------------------

    def _say(self, rank: int, series: Series, to: int) -> None:
        member = self.members[rank]
        for notice in series.notices_for(to):
            self._send(rank, to, notice)
        if to in member.cut_off:
            series.on_lost(to, lost(to))
            member.machine.lose((to,), "it cannot be reached")

    def _send(self, rank: int, to: int, message: Message) -> None:
        """Put a message on its way; one to somebody who is gone finds nobody."""
        member = self.members[rank]
        is_meant = member.linked.get(to, 1) == self.members[to].life
        is_open = to not in member.cut_off and is_meant
        if is_open and self.links[rank, to][-1:] != [("gone",)]:
            self.links[rank, to].append(message)
