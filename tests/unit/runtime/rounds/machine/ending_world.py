"""A group that ends: members that call each other, die and doubt one another.

Each member has its `Termination`; links are queues, in order, of calls, answers, words
of the end, and at last the news that the other end is gone.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from asyncrpc.runtime.rounds.machine.termination import Phase, Termination

Link: TypeAlias = tuple[int, int]
Message: TypeAlias = tuple[str, *tuple[int, ...]]
Step: TypeAlias = tuple[str, *tuple[int, ...]]


@dataclass
class Member:
    """One worker: what is in flight at it, and its view of the end."""

    machine: Termination
    pending: list[int] = field(default_factory=list)  # to whom
    serving: list[tuple[int, int]] = field(default_factory=list)  # from whom, how deep
    started: int = 0
    has_left: bool = False
    is_dead: bool = False
    cut_off: set[int] = field(default_factory=set)  # of whose end it has learnt
    own_calls: int = 0  # that its program still makes before it asks for the end

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
    ) -> None:
        if isinstance(own_calls, int):
            own_calls = [own_calls] * size
        self.size = size
        self.depth = depth  # of the chains of calls
        self.calls = calls  # in all
        self.deaths = deaths
        self.doubts = doubts
        self.members = [
            Member(Termination(rank, size), own_calls=own_calls[rank])
            for rank in range(size)
        ]
        self.links: dict[Link, list[Message]] = {
            (one, other): []
            for one in range(size)
            for other in range(size)
            if one != other
        }

    def copy(self) -> World:
        """Return a world of its own that goes on from here."""
        world: World = pickle.loads(pickle.dumps(self, 5))  # a third of deepcopy's time
        return world

    def key(self) -> object:
        """Return what tells this world from others that will go on differently."""
        members = [
            (
                tuple(sorted(one.pending)),
                tuple(sorted(one.serving)),
                one.started,
                one.has_left,
                one.is_dead,
                tuple(sorted(one.cut_off)),
                one.own_calls,
                _key_of(one.machine),
            )
            for one in self.members
        ]
        links = [(link, tuple(queue)) for link, queue in self.links.items() if queue]
        return tuple(members), tuple(links), self.calls, self.deaths, self.doubts

    # --- what may happen -------------------------------------------------------------

    def steps(self) -> Iterator[Step]:
        """Yield everything that may happen now."""
        for rank, one in enumerate(self.members):
            if one.is_here:
                yield from self._steps_of(rank, one)
        for link, queue in self.links.items():
            if queue:
                yield "deliver", *link

    def _steps_of(self, rank: int, one: Member) -> Iterator[Step]:
        peers = [to for to in range(self.size) if to != rank and to not in one.cut_off]
        if one.machine.phase is Phase.BEFORE:
            yield "enter", rank
            if one.own_calls and self.calls:
                yield from (("call", rank, to, -1) for to in peers)
        for index, (_, depth) in enumerate(one.serving):
            yield "answer", rank, index
            if depth < self.depth and self.calls:
                yield from (("call", rank, to, index) for to in peers)
        if one.machine.is_over:
            yield "leave", rank
        elif one.machine.must_speak:
            is_able = not (one.machine.wave and self.is_busy(rank))
            yield "speak" if is_able else "try_to_speak", rank
        if self.deaths:
            yield "die", rank
        if self.doubts:
            yield from (("doubt", rank, to) for to in peers)

    def is_busy(self, rank: int) -> bool:
        """Whether it is at work, waits, or may hear from one that is left out."""
        one = self.members[rank]
        open_to = sum(1 << to for to in range(self.size) if to not in one.cut_off)
        return bool(one.pending or one.serving or open_to & one.machine.lost)

    def take(self, step: Step) -> None:
        """Let it happen."""
        action: Callable[..., None] = getattr(self, f"_{step[0]}")
        action(*step[1:])
        for rank, one in enumerate(self.members):
            if one.is_here:
                self._tell(rank, one.machine.due())

    def be_silent(self) -> None:
        """Nothing has come for a while: all is told again."""
        for rank, one in enumerate(self.members):
            if one.is_here:
                self._tell(rank, one.machine.overdue())

    # --- what happens ----------------------------------------------------------------

    def _enter(self, rank: int) -> None:
        self.members[rank].machine.enter()

    def _call(self, rank: int, to: int, index: int) -> None:
        one = self.members[rank]
        self.calls -= 1
        if index < 0:
            one.own_calls -= 1
        one.pending.append(to)
        one.started += 1
        depth = 0 if index < 0 else one.serving[index][1]
        self._send(rank, to, ("call", depth + 1))

    def _answer(self, rank: int, index: int) -> None:
        caller, _ = self.members[rank].serving.pop(index)
        self._send(rank, caller, ("answer",))

    def _speak(self, rank: int) -> None:
        one = self.members[rank]
        before = one.machine.phase
        one.machine.speak(busy=self.is_busy(rank), started=one.started)
        self._look(rank, before)

    def _try_to_speak(self, rank: int) -> None:
        self._speak(rank)  # it is busy: nothing may come of it

    def _leave(self, rank: int) -> None:
        self.members[rank].has_left = True
        self._hang_up(rank)

    def _die(self, rank: int) -> None:
        self.deaths -= 1
        self.members[rank].is_dead = True
        self._hang_up(rank)

    def _doubt(self, rank: int, to: int) -> None:
        """The connection breaks, and what is on its way in it is lost."""
        self.doubts -= 1
        for one, other in ((rank, to), (to, rank)):
            self.links[one, other][:] = [("gone",)]

    def _hang_up(self, rank: int) -> None:
        for (one, _other), queue in self.links.items():
            if one == rank and queue[-1:] != [("gone",)]:
                queue.append(("gone",))

    def _deliver(self, from_: int, to: int) -> None:
        message = self.links[from_, to].pop(0)
        one = self.members[to]
        if not one.is_here or from_ in one.cut_off:
            return
        before, beginning = one.machine.phase, one.machine.beginning
        match message:
            case ("call", depth):
                one.serving.append((from_, depth))
            case ("answer",):
                one.pending.remove(from_)
            case ("end",):
                one.machine.hear_end()
            case ("gone",):
                one.cut_off.add(from_)
                one.pending = [peer for peer in one.pending if peer != from_]
                one.serving = [call for call in one.serving if call[0] != from_]
                one.machine.on_lost(from_)
            case ("word", *word):
                if one.machine.hear(*word):
                    self._say(to, from_)
        if one.machine.beginning != beginning:
            self._tell(to, [peer for peer in range(self.size) if peer != to])
        self._look(to, before)

    def _look(self, rank: int, before: Phase) -> None:
        """Check that an end that has just been seen is one, and tell it."""
        if self.members[rank].machine.phase is not Phase.ENDED or before is Phase.ENDED:
            return
        assert self.in_flight() == [], f"{rank} saw an end too early"
        self._tell(rank, [to for to in range(self.size) if to != rank])

    def in_flight(self) -> list[object]:
        """Return the calls of the group: of all but the dead and those left out."""
        lost = 0
        for one in self.members:
            if one.is_here and one.machine.phase is not Phase.EXCLUDED:
                lost |= one.machine.lost
        group = [
            rank
            for rank, one in enumerate(self.members)
            if one.is_here and not lost >> rank & 1
        ]
        found: list[object] = [
            (rank, one.pending, one.serving)
            for rank, one in enumerate(self.members)
            if rank in group and (one.pending or one.serving)
        ]
        found += [
            (link, message)
            for link, queue in self.links.items()
            for message in queue
            if message[0] == "call" and link[1] in group
            if link[0] not in self.members[link[1]].cut_off
        ]
        return found

    # --- words -----------------------------------------------------------------------

    def _tell(self, rank: int, to: list[int]) -> None:
        for other in to:
            self._say(rank, other)

    def _say(self, rank: int, to: int) -> None:
        machine = self.members[rank].machine
        if machine.phase is Phase.ENDED:
            self._send(rank, to, ("end",))
        else:
            word = (machine.lost, machine.wave, machine.known, machine.marked)
            self._send(rank, to, ("word", *word))

    def _send(self, rank: int, to: int, message: Message) -> None:
        """Put a message on its way; one to somebody who is gone finds nobody."""
        is_open = to not in self.members[rank].cut_off
        if is_open and self.links[rank, to][-1:] != [("gone",)]:
            self.links[rank, to].append(message)


def _key_of(machine: Termination) -> object:
    gathering = machine._gathering  # noqa: SLF001
    return (
        machine.phase,
        machine.lost,
        machine.wave,
        machine._started,  # noqa: SLF001
        tuple(machine._owed),  # noqa: SLF001
        gathering.known,
        gathering.marked,
        tuple(sorted(gathering._told.items())),  # noqa: SLF001
    )
