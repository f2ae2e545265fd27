"""The machine of a gang, event by event; why its bundles do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest

from asyncrpc.clusters.ray.machine.placement import NodeResources, find_misfit
from asyncrpc.clusters.ray.machine.supervisor import (
    AbandonGang,
    AnnounceGeneration,
    AnnounceLoss,
    EndWorkers,
    GangBegun,
    GangEffect,
    GangEnd,
    GangEvent,
    GangState,
    GangSupervisor,
    RestartScope,
    StartWorkers,
    TimePassed,
    WorkerEnded,
    WorkerReady,
)
from asyncrpc.clusters.restarts import RestartLimits

SCOPES = pytest.mark.parametrize("scope", RestartScope)
OVER = {GangState.FAILED, GangState.STOPPED}


class World:
    """A machine, and what its effects have done so far."""

    def __init__(self, size: int, scope: RestartScope, restarts_max: int) -> None:
        limits = RestartLimits(
            restarts_max=restarts_max, window_s=None, backoff_s=1.0, backoff_max_s=4.0
        )
        self.machine = GangSupervisor(size, scope=scope, limits=limits)
        self.scope = scope
        self.now_s = 0.0
        self.running: set[tuple[int, int]] = set()
        self.started: set[tuple[int, int]] = set()
        self.ready: set[tuple[int, int]] = set()
        self.losses = 0
        self.effects: list[GangEffect] = []

    def feed(self, event: GangEvent) -> list[GangEffect]:
        was_over = self.machine.state in OVER
        effects = self.machine.advance(event)
        assert not (was_over and effects)
        for effect in effects:
            self.do(effect)
        if isinstance(event, WorkerReady) and (event.rank, event.life) in self.running:
            self.ready.add((event.rank, event.life))
        self.check()
        return effects

    def do(self, effect: GangEffect) -> None:
        match effect:
            case StartWorkers(generation, lives):
                assert lives
                assert generation == self.machine.generation
                for life in lives:
                    assert life not in self.started  # no life begins twice
                    assert life[0] not in {rank for rank, _ in self.running}
                self.started |= set(lives)
                self.running |= set(lives)
            case EndWorkers(lives):
                assert set(lives) <= self.running
                self.running -= set(lives)
            case AnnounceLoss(generation):
                assert generation == self.machine.generation
                self.effects.append(effect)
            case AnnounceGeneration(generation, ranks):
                assert generation == self.machine.generation
                assert ranks
                before = [
                    effect
                    for effect in self.effects
                    if type(effect) is AnnounceGeneration
                ]
                assert all(effect.generation < generation for effect in before)
                self.effects.append(effect)
            case AbandonGang():
                self.effects.append(effect)

    def check(self) -> None:
        """What holds in every state."""
        machine = self.machine
        state, size = machine.state, len(machine.lives)
        if state in OVER:
            assert not self.running
            assert machine.wakes_at_s is None
        if state in {GangState.STARTING, GangState.RUNNING}:
            assert len(self.running) == size  # each rank has one life, and one only
            assert machine.wakes_at_s is None
        if state is GangState.WAITING and machine.generation:
            assert machine.wakes_at_s is not None
            assert len(self.running) < size
            if self.scope is RestartScope.GANG:
                assert not self.running
        assert (state is GangState.FAILED) == (
            [type(effect) for effect in self.effects].count(AbandonGang) == 1
        )

    def events(self) -> Iterator[GangEvent]:
        """Everything that could come now: of present, former and ended lives."""
        yield GangBegun(self.now_s)
        yield GangEnd(self.now_s)
        yield TimePassed(self.now_s)
        yield TimePassed(self.now_s + 100.0)
        for rank, life in sorted(self.started):
            yield WorkerReady(rank, life, self.now_s)
            yield WorkerEnded(rank, life, "killed", self.now_s)

    def key(self) -> str:
        machine = self.machine
        fields = vars(machine)
        assert " at 0x" not in repr(fields)  # or no state would be seen twice
        return repr((fields, sorted(self.running), sorted(self.started)))


@SCOPES
@pytest.mark.parametrize(("size", "restarts_max"), [(1, 2), (2, 1), (2, 2), (3, 1)])
def test_gang_keeps_its_invariants_for_every_sequence_of_events(
    scope: RestartScope, size: int, restarts_max: int
) -> None:
    """All states that can be reached, with late and repeated events in each."""
    first = World(size, scope, restarts_max)
    seen, left = {first.key()}, [first]
    states = set()
    while left:
        world = left.pop()
        states.add(world.machine.state)
        for event in list(world.events()):
            following = copy.deepcopy(world)
            following.feed(event)
            if following.key() not in seen:
                seen.add(following.key())
                left.append(following)
    assert states == set(GangState)


def begun(
    size: int = 2,
    scope: RestartScope = RestartScope.GANG,
    **limits: float | None,
) -> GangSupervisor:
    """Return a machine whose first generation runs."""
    machine = GangSupervisor(size, scope=scope, limits=RestartLimits(**limits))  # type: ignore[arg-type]
    machine.advance(GangBegun(0.0))
    for rank in range(size):
        machine.advance(WorkerReady(rank, 1, 0.0))
    return machine


def test_loss_of_a_worker_restarts_the_gang() -> None:
    machine = begun()
    assert machine.state is GangState.RUNNING
    assert machine.advance(WorkerEnded(1, 1, "killed", 10.0)) == [
        EndWorkers(((0, 1), (1, 1))),
        AnnounceLoss(1, (1,), "killed"),
    ]
    assert machine.wakes_at_s == 11.0
    assert machine.advance(TimePassed(10.5)) == []
    assert machine.advance(TimePassed(11.0)) == [StartWorkers(2, ((0, 2), (1, 2)))]
    assert machine.advance(WorkerReady(0, 2, 12.0)) == []
    assert machine.advance(WorkerReady(1, 2, 12.0)) == [AnnounceGeneration(2, (0, 1))]


def test_lost_worker_alone_restarts_in_worker_scope() -> None:
    machine = begun(3, RestartScope.WORKER)
    assert machine.advance(WorkerEnded(1, 1, "killed", 0.0))[0] == EndWorkers(((1, 1),))
    assert machine.advance(TimePassed(1.0)) == [StartWorkers(2, ((1, 2),))]
    assert machine.advance(WorkerReady(1, 2, 2.0)) == [AnnounceGeneration(2, (1,))]
    assert machine.lives == [1, 2, 1]


def test_losses_before_the_restart_share_it() -> None:
    """A node that takes several workers with it costs one restart."""
    machine = begun(3, RestartScope.WORKER, restarts_max=1)
    for rank in range(3):
        effects = machine.advance(WorkerEnded(rank, 1, "node", 0.0))
        assert effects == [EndWorkers(((rank, 1),)), AnnounceLoss(1, (rank,), "node")]
    started = machine.advance(TimePassed(1.0))
    assert started == [StartWorkers(2, ((0, 2), (1, 2), (2, 2)))]


def test_events_of_a_former_life_change_nothing() -> None:
    machine = begun()
    machine.advance(WorkerEnded(0, 1, "killed", 0.0))
    machine.advance(TimePassed(1.0))
    for late in (WorkerEnded(1, 1, "ended by us", 1.0), WorkerReady(0, 1, 1.0)):
        assert machine.advance(late) == []
    assert machine.state is GangState.STARTING


def test_first_generation_is_not_restarted() -> None:
    machine = GangSupervisor(2)
    machine.advance(GangBegun(0.0))
    assert machine.advance(WorkerEnded(0, 1, "no such module", 0.0)) == [
        EndWorkers(((0, 1), (1, 1))),
        AbandonGang(1, "no such module"),
    ]


def test_failed_restart_counts() -> None:
    machine = begun(restarts_max=2)
    for life in (1, 2):
        machine.advance(WorkerEnded(0, life, "killed", 0.0))
        machine.advance(TimePassed(100.0))
    assert machine.generation == 3
    effects = machine.advance(WorkerEnded(0, 3, "killed", 200.0))
    assert effects[-1] == AbandonGang(3, "killed")
    assert machine.state is GangState.FAILED


def test_restarts_are_forgotten_after_the_window() -> None:
    machine = begun(1, restarts_max=1, window_s=60.0)
    for at_s in (0.0, 60.0, 120.0):
        machine.advance(WorkerEnded(0, machine.lives[0], "killed", at_s))
        assert machine.state is GangState.WAITING
        machine.advance(TimePassed(at_s + 30.0))
    machine.advance(WorkerEnded(0, machine.lives[0], "killed", 179.0))
    assert machine.state is GangState.FAILED


def test_restart_pause_doubles_up_to_a_limit() -> None:
    machine = begun(
        1, restarts_max=5000, window_s=None, backoff_s=1.0, backoff_max_s=6.0
    )
    waits = []
    for life in range(1, 2001):
        machine.advance(WorkerEnded(0, life, "killed", 0.0))
        waits.append(machine.wakes_at_s)
        machine.advance(TimePassed(10.0))
    assert waits[:5] == [1.0, 2.0, 4.0, 6.0, 6.0]
    assert set(waits[5:]) == {6.0}


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param(lambda _: WorkerReady(0, 7, 0.0), id="a life that never began"),
        pytest.param(lambda _: GangBegun(0.0), id="a second beginning"),
        pytest.param(lambda _: TimePassed(1e9), id="unexpected end of a rest"),
    ],
)
def test_impossible_event_changes_nothing(
    wrong: Callable[[GangSupervisor], GangEvent],
) -> None:
    machine = begun()
    assert machine.advance(wrong(machine)) == []
    assert machine.state is GangState.RUNNING


CPU2 = {"CPU": 2.0}


def node(name: str, total: float, free: float | None = None) -> NodeResources:
    return NodeResources(name, {"CPU": total}, {"CPU": total if free is None else free})


NODES = [node("a", 2), node("b", 4, 1)]


@pytest.mark.parametrize(
    ("bundles", "strategy", "misfits", "words"),
    [
        ([{"CPU": 1}, {"GPU": 1}], "PACK", (1,), "large enough for bundle 1 (GPU=1)"),
        ([{"CPU": 8}], "SPREAD", (0,), "no node is large enough"),
        ([{"CPU": 2}, {"CPU": 2}], "PACK", (1,), "not enough is free now for bundle 1"),
        ([{"CPU": 2}, {"CPU": 1}], "PACK", (), "room now"),
        ([{"CPU": 1}] * 3, "STRICT_SPREAD", (2,), "needs 3 nodes"),
        ([{"CPU": 1}, {"CPU": 2}], "STRICT_SPREAD", (), "room now"),
        ([{"CPU": 2}, {"CPU": 2}], "STRICT_SPREAD", (1,), "not enough is free now"),
        ([{"CPU": 3}, {"CPU": 3}], "STRICT_PACK", (0, 1), "none is so large"),
        ([{"CPU": 2}, {"CPU": 2}], "STRICT_PACK", (0, 1), "none has so much free"),
        ([{"CPU": 1}, {"CPU": 1}], "STRICT_PACK", (), "room now"),
        ([{"CPU": 1, "disk": 1}], "PACK", (0,), "CPU=1 disk=1"),
    ],
)
def test_misfit_names_its_bundles_and_the_reason(
    bundles: list[dict[str, float]],
    strategy: str,
    misfits: tuple[int, ...],
    words: str,
) -> None:
    misfit = find_misfit(bundles, strategy, NODES)
    assert misfit.bundles == misfits
    assert words in misfit.why


def test_misfit_shows_the_resources_of_the_nodes() -> None:
    assert "a: CPU=2, b: CPU=4" in find_misfit([{"CPU": 9}], "PACK", NODES).why
    assert "a: CPU=2, b: CPU=1" in find_misfit([CPU2, CPU2], "PACK", NODES).why


def test_misfit_text_stays_short() -> None:
    many = [node(f"n{number}", 1) for number in range(100)]
    why = find_misfit([CPU2] * 100, "PACK", many).why
    assert "and 92 more" in why
    assert len(why) < 700


def test_bundles_fit_nowhere_without_nodes() -> None:
    misfit = find_misfit([CPU2], "PACK", [])
    assert misfit.bundles == (0,)
    assert "the nodes have: none" in misfit.why
