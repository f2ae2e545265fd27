"""Workers of an elastic group, and the network between them: every order of events.

Each member comes to a border once, some die at any moment, and newcomers ask to be let
in.  Messages between two workers come in order; a worker learns of a death at any time
after the messages of the dead one.

Safety: of the views of one generation at most one is installed by all of its members.
Liveness: when nothing can happen any more, nobody who lives waits, and all have the
same view, unless too few are left for a quorum.
"""

from __future__ import annotations

import pickle
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, Final, TypeAlias

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.parallel.collectives.machine.views import View

Action: TypeAlias = tuple[str, int, int]
LETTERS: Final = "abcdefgh"


@dataclass(frozen=True, slots=True)
class Scene:
    members: int  # of the first generation; 0: all begin
    newcomers: int = 0  # that ask to be let in
    deaths: int = 0  # how many may die
    needs_majority: bool = True  # whether each border asks for a quorum


@dataclass(slots=True)
class _One:
    """A worker: its machine, and what is on its way to it, by sender."""

    machine: Any
    inbox: dict[int, deque[Any]] = field(default_factory=dict)
    has_come: bool = False
    is_dead: bool = False
    unheard: set[int] = field(default_factory=set)  # deaths that it does not know


class ElasticWorld:
    """All workers after some events."""

    def __init__(self, build: ModuleType, scene: Scene) -> None:
        self.scene = scene
        self.build = build
        count = scene.members + scene.newcomers
        self.ids = [WorkerId(LETTERS[n], Incarnation(n + 1)) for n in range(count)]
        self.all = [
            _One(build.ElasticMember(worker_id, n))
            for n, worker_id in enumerate(self.ids)
        ]
        self.deaths_left = scene.deaths
        self.installed: dict[tuple[int, tuple[WorkerId, ...]], set[WorkerId]] = {}
        members = tuple(self.ids[: scene.members])
        for member in self.all[: scene.members]:
            member.machine.state = build.MEMBER
            member.machine.view = View(1, members, (0,) * len(members))

    def possible(self) -> Iterator[Action]:
        """Yield what may happen next."""
        for number, member in enumerate(self.all):
            if member.is_dead:
                continue
            if not member.has_come:
                yield "come", number, 0
            if self.deaths_left:
                yield "die", number, 0
            for sender, messages in member.inbox.items():
                if messages:
                    yield "hear", number, sender
            for dead in member.unheard:
                if not member.inbox.get(dead):
                    yield "lose", number, dead

    def do(self, action: Action) -> None:
        """Let something happen."""
        what, number, other = action
        member = self.all[number]
        match what:
            case "come":
                member.has_come = True
                asked = self.build.Application(
                    step=0, needs_majority=self.scene.needs_majority
                )
                roster = [LETTERS[n] for n in range(len(self.all)) if n != number]
                member.machine.come(asked, roster)
            case "die":
                self.deaths_left -= 1
                member.is_dead = True
                for n, survivor in enumerate(self.all):
                    if n != number:
                        survivor.unheard.add(number)
            case "hear":
                member.machine.receive(self.ids[other], member.inbox[other].popleft())
            case _:
                member.unheard.discard(other)
                member.machine.lose(self.ids[other])
        self._send(number)
        self._check(number)

    def _send(self, number: int) -> None:
        machine = self.all[number].machine
        for name in machine.outbox:
            receiver = self.all[LETTERS.index(name)]
            if not receiver.is_dead:
                box = receiver.inbox.setdefault(number, deque())
                box.append(machine.standing)
        machine.outbox.clear()

    def _check(self, number: int) -> None:
        machine = self.all[number].machine
        if machine.state is not self.build.MEMBER or machine.view.generation < 2:
            return
        view = machine.view
        assert self.ids[number] in view.members, "it has installed a view of others"
        key = view.generation, view.members
        self.installed.setdefault(key, set()).add(self.ids[number])
        whole = [
            (generation, members)
            for (generation, members), by in self.installed.items()
            if by == set(members)
        ]
        generations = [generation for generation, _ in whole]
        if self.scene.needs_majority:
            assert len(set(generations)) == len(generations), "two groups go on"

    def check_end(self) -> None:
        """Check what must be so when nothing can happen any more."""
        build = self.build
        alive = [member.machine for member in self.all if not member.is_dead]
        members = [member for member in alive if member.state is build.MEMBER]
        stuck = [member for member in alive if not member.has_quorum]
        if not stuck:
            waiting = [member.me.name for member in alive if member.is_here]
            late = [
                member
                for member in alive
                if member.is_here and member.state is build.JOINING
            ]
            # A newcomer that came too late waits for the next border.
            assert len(waiting) == len(late), f"{waiting} wait for ever"
            views = {member.view for member in members}
            assert len(views) <= 1, f"they have {len(views)} views"
            assert not late or members, f"{waiting} wait for nobody"

    def key(self) -> bytes:
        """Return everything that is so, to tell worlds apart."""
        return repr(
            [
                (
                    member.machine.state.name,
                    member.machine.view.key,
                    _of(member.machine.proposal),
                    sorted(
                        (who, _of(applicant))
                        for who, applicant in member.machine._heard.items()  # noqa: SLF001
                    ),
                    sorted(member.machine._roster.items()),  # noqa: SLF001
                    sorted(member.machine._lost),  # noqa: SLF001
                    [
                        (
                            sender,
                            [(s.view.key, s.is_here, _of(s.proposal)) for s in box],
                        )
                        for sender, box in sorted(member.inbox.items())
                        if box
                    ],
                    (member.has_come, member.is_dead, sorted(member.unheard)),
                )
                for member in self.all
            ]
        ).encode()


def _of(proposal: Any) -> object:
    return (
        sorted(proposal.applicants.values()),
        sorted(proposal.accusations),
        sorted(proposal.departures.items()),
    )


def visit(build: ModuleType, scene: Scene, worlds_max: int) -> int:
    """Visit all that can happen; return how many worlds there are."""
    first = ElasticWorld(build, scene)
    todo: list[bytes] = [_packed(first)]
    seen = {first.key()}
    while todo:
        packed = todo.pop()
        actions = list(_unpacked(packed, build).possible())
        if not actions:
            _unpacked(packed, build).check_end()
        for action in actions:
            world = _unpacked(packed, build)
            world.do(action)
            key = world.key()
            if key not in seen:
                seen.add(key)
                assert len(seen) <= worlds_max, "more worlds than expected"
                todo.append(_packed(world))
    return len(seen)


def _packed(world: ElasticWorld) -> bytes:
    build, world.build = world.build, None  # type: ignore[assignment]
    try:
        return pickle.dumps(world)
    finally:
        world.build = build


def _unpacked(packed: bytes, build: ModuleType) -> ElasticWorld:
    world: ElasticWorld = pickle.loads(packed)
    world.build = build
    return world


def play(build: ModuleType, scene: Scene, seeds: Sequence[int]) -> None:
    """Let events happen in random orders."""
    for seed in seeds:
        chance = random.Random(seed)
        world = ElasticWorld(build, scene)
        try:
            while actions := list(world.possible()):
                world.do(chance.choice(actions))
            world.check_end()
        except AssertionError as error:
            raise AssertionError(f"seed {seed} of {scene}: {error}") from error
