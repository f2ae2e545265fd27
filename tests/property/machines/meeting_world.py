"""A meeting point, workers that come to it, die and come again, in every order.

Each rank has at most one life at a time.  The store lives with rank 0's, which hosts
it.  A step is one of: a life ends, another begins, a worker does the next thing that
its machines say, or notices that a member is gone.  Now and then no member of an offer
can be reached although it is there.

What must hold in every state: all lives that are in a group are in the same one.  What
must come about, wherever deaths and bad luck end: all ranks are in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Final, TypeVar

from asyncrpc.core.ids import Incarnation
from asyncrpc.core.members import Member

T = TypeVar("T")
ALL: Final = "all"
RUNNING: Final = "running"
SWEEPS_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a rank."""

    number: int  # of it, among all
    arrival: str = "WAITING"  # the name of the state of its machine
    # That it is in; empty before it is in one.
    group: tuple[int, int] = ()  # type: ignore[assignment]
    round: int = -1  # in which it meets others; -1: it must look at the store
    store: int = -1  # that it knows
    offer: tuple[int, ...] = ()  # that it looks at
    refused: tuple[int, ...] = ()  # the offer that nobody answered
    keeping: str = "RESTING"  # the name of the state of the other machine
    has_loss: bool = False  # whether a member is gone, which it has not noticed


@dataclass(frozen=True, slots=True)
class Store:
    """What is at the meeting point."""

    number: int  # of it, among all
    words: tuple[str, ...]  # of each round; empty before one is given
    # The life of each rank, in each round; 0: none.
    records: tuple[tuple[int, ...], ...]
    came: tuple[int, ...]  # the life of each rank that came last
    offer: tuple[int, ...] = ()  # lives of members


@dataclass(frozen=True, slots=True)
class World:
    """One state of all."""

    lives: tuple[Life | None, ...]
    store: Store | None = None
    stores: int = 0
    numbers: int = 0
    deaths: int = 0  # that may still come
    lies: int = 0  # likewise


def begun(size: int, deaths: int, lies: int) -> World:
    return World((None,) * size, deaths=deaths, lies=lies)


class Rules:
    """What may happen, by builds of the two machines."""

    def __init__(self, arriving: ModuleType, keeping: ModuleType) -> None:
        self._arriving = arriving
        self._keeping = keeping

    # --- every step ------------------------------------------------------------------

    def steps(self, world: World) -> Iterator[World]:
        """Return all worlds that may follow."""
        for rank, life in enumerate(world.lives):
            if life is None:
                yield self.start(world, rank)
                continue
            if world.deaths:
                yield self.kill(world, rank)
            yield from self.arrive(world, rank, life)
            yield from self.keep(world, rank, life)

    def start(self, world: World, rank: int) -> World:
        """A process of a rank begins; rank 0 hosts a store if there is none."""
        number = world.numbers + 1
        after = _with(world, rank, Life(number))
        after = replace(after, numbers=number)
        if rank or after.store is not None:
            return after
        nobody = (0,) * len(world.lives)
        store = Store(world.stores, ("",), (nobody,), nobody)
        return replace(after, store=store, stores=world.stores + 1)

    def kill(self, world: World, rank: int) -> World:
        """A process ends, and the store with it, if it is its host."""
        dead, store = world.lives[rank], world.store
        assert dead is not None
        met = [] if store is None else zip(store.words, store.records, strict=True)
        is_member = any(word == ALL and dead.number in all_ for word, all_ in met)
        if dead.group or is_member:  # else no member has heard of it
            world = _with_losses(world, rank)
        after = replace(_with(world, rank, None), deaths=world.deaths - 1)
        return replace(after, store=None if rank == 0 else store)

    # --- a worker that comes ---------------------------------------------------------

    def arrive(self, world: World, rank: int, life: Life) -> Iterator[World]:
        """Do what its machine says; in several ways, if luck decides."""
        if life.group:
            return
        act = {
            "WAITING": self._wait,
            "KNOCKING": self._knock,
            "CLAIMING": self._claim,
            "ASKING": self._ask,
            "JOINING": self._join,
        }
        yield from (
            after for after in act[life.arrival](world, rank, life) if after != world
        )

    def _wait(self, world: World, rank: int, life: Life) -> Iterator[World]:
        store = world.store
        if life.store != -1 and self._has_lost(world, life):
            yield _with(world, rank, replace(life, store=-1, round=-1))
        if store is not None:
            yield from self._meet(world, rank, life, store)

    def _knock(self, world: World, rank: int, life: Life) -> Iterator[World]:
        is_there = bool(self._offered(world, life))
        if is_there:
            yield self._advanced(world, rank, life, "ANSWERED")
        yield from self._silent(world, rank, life, is_there=is_there)

    def _claim(self, world: World, rank: int, life: Life) -> Iterator[World]:
        store = world.store
        if store is None or store.number != life.store:
            yield self._advanced(world, rank, life, "TOO_LATE")
            return
        word = store.words[life.round]
        if not word:
            word = RUNNING
            words = _put(store.words, life.round, RUNNING)
            world = replace(world, store=replace(store, words=words))
        is_new = store.records[life.round][rank] == life.number
        event = "TOO_LATE" if word == ALL and is_new else "CLAIMED"
        yield self._advanced(world, rank, life, event)

    def _ask(self, world: World, rank: int, life: Life) -> Iterator[World]:
        offered = self._offered(world, life)
        for other in offered:
            taken = replace(life, group=other.group)
            yield _with_losses(self._advanced(world, rank, taken, "ADMITTED"), rank)
        yield from self._silent(world, rank, life, is_there=bool(offered))

    def _join(self, world: World, rank: int, life: Life) -> Iterator[World]:
        if self._has_lost(world, life):
            yield _with(world, rank, None)  # its time is up, and it ends
            return
        for other in world.lives:
            if other is not None and other.group:
                taken = replace(life, group=other.group)
                yield _with_losses(self._advanced(world, rank, taken, "ADMITTED"), rank)

    def _silent(
        self, world: World, rank: int, life: Life, *, is_there: bool
    ) -> Iterator[World]:
        if not is_there or world.lies:
            lied = replace(world, lies=world.lies - is_there)
            refused = replace(life, refused=life.offer)
            yield self._advanced(lied, rank, refused, "SILENT")

    def _has_lost(self, world: World, life: Life) -> bool:
        return world.store is None or world.store.number != life.store

    def _meet(
        self, world: World, rank: int, life: Life, store: Store
    ) -> Iterator[World]:
        came = _put(store.came, rank, life.number)
        turn = 0
        while store.words[turn] == RUNNING:
            turn += 1
            if turn == len(store.words):
                nobody = (0,) * len(world.lives)
                words, records = (*store.words, ""), (*store.records, nobody)
                store = replace(store, words=words, records=records)
        store = replace(store, came=came)
        life = replace(life, store=store.number, round=turn)
        record = store.records[turn][rank]
        if store.words[turn] == ALL and record == life.number:
            met = replace(life, group=(store.number, turn))
            yield self._advanced(replace(world, store=store), rank, met, "ALL_CAME")
            return
        if store.offer:
            looks = replace(life, offer=store.offer)
            yield self._advanced(replace(world, store=store), rank, looks, "OFFER")
            if store.offer != life.refused:
                return
        if store.words[turn] == ALL:
            here = replace(world, store=store)
            yield self._advanced(here, rank, life, "MET_BEFORE")
            return
        row: tuple[int, ...] = _put(store.records[turn], rank, life.number)
        word = ALL if all(row) else ""
        store = replace(
            store,
            records=_put(store.records, turn, row),
            words=_put(store.words, turn, word),
        )
        yield _with(replace(world, store=store), rank, life)

    def _offered(self, world: World, life: Life) -> list[Life]:
        """Return the members of an offer that are there."""
        alive = [life for life in world.lives if life is not None and life.group]
        return [other_life for other_life in alive if other_life.number in life.offer]

    def _advanced(self, world: World, rank: int, life: Life, event: str) -> World:
        machine = self._arriving.MeetingArrival()
        machine.state = self._arriving.ArrivalState[life.arrival]
        machine.advance(self._arriving.ArrivalEvent[event])
        return _with(world, rank, replace(life, arrival=machine.state.name))

    # --- a member that is left -------------------------------------------------------

    def keep(self, world: World, rank: int, life: Life) -> Iterator[World]:
        """Notice a loss, or do what the other machine says."""
        if not life.group:
            return
        present = _members(world)
        if life.has_loss:
            size = len(world.lives)
            loss = self._keeping.event_of_change(life.number, present, size)
            heard = replace(life, has_loss=False)
            yield self._kept(world, rank, heard, loss)
        store = world.store
        if life.keeping == "LOOKING":
            finding = self._keeping.NOTHING_FOUND
            if store is not None and any(store.came):
                holder = Incarnation(store.came[rank])
                offered = tuple(map(Incarnation, store.offer))
                finding = self._keeping.Finding("run", holder, offered)
            event = self._keeping.judge(finding, "run", life.number, present)
            yield self._kept(world, rank, life, event)
        elif life.keeping == "OFFERING":
            if store is None:
                yield self._kept(world, rank, life, self._event("ABSENT"))
            else:
                offer = [
                    present_member.incarnation
                    for present_member in self._keeping.offer_of(present)
                ]
                here = replace(world, store=replace(store, offer=tuple(offer)))
                yield self._kept(here, rank, life, self._event("WRITTEN"))
        elif life.keeping == "PAUSING":
            yield self._kept(world, rank, life, self._event("TIME_UP"))

    def _event(self, name: str) -> object:
        return self._keeping.KeepingEvent[name]

    def _kept(self, world: World, rank: int, life: Life, event: object) -> World:
        machine = self._keeping.MeetingKeeping()
        machine.state = self._keeping.KeepingState[life.keeping]
        machine.advance(event)
        return _with(world, rank, replace(life, keeping=machine.state.name))

    # --- what must hold --------------------------------------------------------------

    def settles(self, world: World) -> bool:
        """Return whether all come to be in one group, if nothing else goes wrong."""
        world = replace(world, deaths=0, lies=0)
        for sweep in range(SWEEPS_MAX):
            for rank in range(len(world.lives)):
                for _ in range(2):
                    world = self._some_step(world, rank, sweep)
            lives = [life for life in world.lives if life is not None and life.group]
            if len(lives) == len(world.lives):
                return True
        return False

    def _some_step(self, world: World, rank: int, sweep: int) -> World:
        life = world.lives[rank]
        if life is None:
            return self.start(world, rank)
        steps = [*self.arrive(world, rank, life), *self.keep(world, rank, life)]
        return steps[sweep % len(steps)] if steps else world


def groups(world: World) -> set[tuple[int, int]]:
    return {life.group for life in world.lives if life is not None and life.group}


def explore(rules: Rules, first: World) -> int:
    """Visit every state; return how many there are."""
    seen, unvisited = {first}, [first]
    while unvisited:
        world = unvisited.pop()
        assert len(groups(world)) <= 1, world
        assert rules.settles(world), world
        for step in rules.steps(world):
            if step not in seen:
                seen.add(step)
                unvisited.append(step)
    return len(seen)


def _members(world: World) -> list[Member]:
    return [
        Member(f"worker{rank}", rank, Incarnation(life.number), ())
        for rank, life in enumerate(world.lives)
        if life is not None and life.group
    ]


def _with_losses(world: World, about: int) -> World:
    """Let all members but one have something to notice."""
    lives = tuple(
        replace(life, has_loss=True)
        if life is not None and life.group and rank != about
        else life
        for rank, life in enumerate(world.lives)
    )
    return replace(world, lives=lives)


def _with(world: World, rank: int, life: Life | None) -> World:
    return replace(world, lives=_put(world.lives, rank, life))


def _put(items: tuple[T, ...], at: int, item: T) -> tuple[T, ...]:
    return (*items[:at], item, *items[at + 1 :])
