"""Carries out the decisions of a gang's machine: starts, watches and ends workers.

One task feeds the machine, in order; each life of a worker has its own task, which
starts it and then waits for its end.  All that these tasks learn are events for the
machine; they decide nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from asyncrpc.clusters.presence import Presence
from asyncrpc.clusters.ray.actor import GangWorker, WorkerActor, WorkerOrder
from asyncrpc.clusters.ray.changes import Announcer, GangChange, GangChangeKind
from asyncrpc.clusters.ray.cluster import Bundles, Handle
from asyncrpc.clusters.ray.machine.placement import find_misfit
from asyncrpc.clusters.ray.machine.supervisor import (
    OVER,
    AbandonGang,
    AnnounceGeneration,
    AnnounceLoss,
    EndWorkers,
    GangBegun,
    GangEffect,
    GangEnd,
    GangEvent,
    GangSupervisor,
    StartWorkers,
    TimePassed,
    WorkerEnded,
    WorkerReady,
)
from asyncrpc.errors import AsyncRpcError

STOP_S: Final = 5.0  # for a worker to shut down before its actor is killed
WHY_CHARACTERS_MAX: Final = 2000  # Ray's texts may hold whole tracebacks


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlan:
    """The parts of a gang that do not change.

    Attributes:
        orders: for each worker, by rank.
        runtime_env: of the actors, as Ray takes it; None: that of the driver.
        start_timeout_s: seconds that a worker may take to start, placement included.
        drain_timeout_s: seconds that calls in flight have when the gang ends.
    """

    orders: Sequence[WorkerOrder]
    bundles: Bundles
    runtime_env: Mapping[str, Any] | None
    start_timeout_s: float
    drain_timeout_s: float


@dataclass(slots=True)
class _Life:
    """One life of a worker, as the conductor sees it."""

    task: asyncio.Task[None]
    handle: Handle = None
    worker: GangWorker | None = None
    step: str = "waiting for its former life to end"
    is_over: bool = False  # the machine has ended it


@dataclass(slots=True)
class GangFailure:
    """Why the gang failed, and the bundles that do not fit, if that is the reason."""

    why: str = ""
    misfits: tuple[int, ...] | None = None


@dataclass(slots=True)
class Conductor:
    """Runs the machine of one gang.

    Attributes:
        plan: the parts that do not change.
        presence: which workers the driver's worker takes to be alive.
        tasks: the group of all tasks.
        lives: the present lives, by rank.
    """

    plan: GangPlan
    machine: GangSupervisor
    announcer: Announcer
    presence: Presence
    tasks: asyncio.TaskGroup
    failure: GangFailure = field(default_factory=GangFailure)
    lives: dict[int, _Life] = field(default_factory=dict)
    _events: asyncio.Queue[GangEvent] = field(default_factory=asyncio.Queue)
    _ends: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    _meeting: asyncio.Task[None] | None = None

    # --- events ----------------------------------------------------------------------

    async def run(self) -> None:
        """Feed the machine until the gang is over."""
        self._events.put_nowait(GangBegun(self._now_s()))
        while self.machine.state not in OVER:
            event = await self._next_event()
            for effect in self.machine.advance(event):
                self._carry_out(effect)
        self.announcer.end()

    async def finish(self) -> None:
        """End the gang; return once no worker runs."""
        for effect in self.machine.advance(GangEnd(self._now_s())):
            self._carry_out(effect)
        self.announcer.end()
        self._end_meeting()
        if self._ends:
            await asyncio.wait(self._ends.values())

    @property
    def present(self) -> list[_Life]:
        """The lives that have begun and not ended, by rank."""
        return [life for _, life in sorted(self.lives.items()) if not life.is_over]

    def on_gone(self, name: str, incarnation: int, why: str) -> None:
        """Note that a worker is gone, as the driver's worker sees it."""
        for rank, life in self.lives.items():
            worker = life.worker
            if worker is not None and (worker.name, worker.incarnation) == (
                name,
                incarnation,
            ):
                self._tell_ended(rank, self.machine.lives[rank], why)

    async def _next_event(self) -> GangEvent:
        try:
            async with asyncio.timeout_at(self.machine.wakes_at_s):
                return await self._events.get()
        except TimeoutError:
            return TimePassed(self._now_s())

    def _tell_ended(self, rank: int, life: int, why: str) -> None:
        named = f"worker {self.plan.orders[rank].name!r}: {why}"
        self._events.put_nowait(WorkerEnded(rank, life, named, self._now_s()))

    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    # --- effects ---------------------------------------------------------------------

    def _carry_out(self, effect: GangEffect) -> None:
        match effect:
            case StartWorkers(generation, lives):
                for rank, number in lives:
                    self._begin(rank, number, generation)
            case EndWorkers(lives):
                self._end_meeting()
                for rank, _ in lives:
                    self._end(rank)
            case AnnounceLoss(generation, ranks, why):
                self._announce(GangChangeKind.LOST, generation, ranks, why)
            case AnnounceGeneration(generation, ranks):
                meeting = self._meet(generation, ranks)
                self._meeting = self.tasks.create_task(meeting)
            case AbandonGang(generation, why):
                self.failure.why = why
                self._announce(GangChangeKind.FAILED, generation, (), why)

    def _announce(
        self,
        kind: GangChangeKind,
        generation: int,
        ranks: tuple[int, ...],
        why: str = "",
    ) -> None:
        self.announcer.tell(GangChange(kind, generation, ranks, why))

    def _end_meeting(self) -> None:
        if self._meeting is not None:
            self._meeting.cancel()
            self._meeting = None

    async def _meet(self, generation: int, ranks: tuple[int, ...]) -> None:
        """Let all workers know each other, then announce the generation."""
        names = [order.name for order in self.plan.orders]
        lives = tuple(self.machine.lives)

        async def meet(rank: int) -> None:
            try:
                await self.lives[rank].handle.meet.remote(names)
            except Exception as error:
                self._tell_ended(rank, lives[rank], _why(error))
                raise

        met = await asyncio.gather(
            *(meet(rank) for rank in range(len(names))), return_exceptions=True
        )
        if not any(isinstance(outcome, BaseException) for outcome in met):
            self._announce(GangChangeKind.RUNNING, generation, ranks)

    # --- one life --------------------------------------------------------------------

    def _begin(self, rank: int, number: int, generation: int) -> None:
        work = self._live(rank, number, generation)
        self.lives[rank] = _Life(self.tasks.create_task(work))

    async def _live(self, rank: int, number: int, generation: int) -> None:
        life = self.lives[rank]
        try:
            async with asyncio.timeout(self.plan.start_timeout_s):
                life.worker = await self._start(rank, life, generation)
        except TimeoutError:
            why = await self._why_late(life)
            self._tell_ended(rank, number, why)
            return
        except Exception as error:  # noqa: BLE001  (the machine hears of it)
            self._tell_ended(rank, number, f"{life.step} failed: {_why(error)}")
            return
        self._events.put_nowait(WorkerReady(rank, number, self._now_s()))
        why = "its worker was stopped"
        try:
            await life.handle.ended.remote()
        except Exception as error:  # noqa: BLE001  (likewise)
            why = _why(error)
        self._tell_ended(rank, number, why)

    async def _start(self, rank: int, life: _Life, generation: int) -> GangWorker:
        ending = self._ends.get(rank)
        if ending is not None:
            await asyncio.wait([ending])
        await self.presence.until_gone(self.plan.orders[rank].name)
        order, bundles = self.plan.orders[rank], self.plan.bundles
        while True:
            life.step = "placing its bundle"
            await bundles.placed()
            node_id = await bundles.node_of(rank)
            life.step = "starting its actor"
            try:
                life.handle = await bundles.start_actor(
                    rank, WorkerActor, runtime_env=self.plan.runtime_env
                )
                return await self._first_answer(life.handle, order, generation)
            except bundles.actor_errors:
                # A lost worker is noticed at once, but Ray notices a dead node after
                # some 10 s, and until then starts actors there.  That is not a failure
                # of the worker.
                if await bundles.is_alive(node_id):
                    raise

    async def _first_answer(
        self, handle: Handle, order: WorkerOrder, generation: int
    ) -> GangWorker:
        worker: GangWorker = await handle.start.remote(order, generation)
        return worker

    async def _why_late(self, life: _Life) -> str:
        """Return why a life did not start in time."""
        limit = f"not ready within {self.plan.start_timeout_s:g} s"
        if life.step != "placing its bundle":
            return f"{limit}: still {life.step}"
        bundles = self.plan.bundles
        nodes = await bundles.nodes()
        misfit = find_misfit(bundles.resources, bundles.strategy, nodes)
        self.failure.misfits = misfit.bundles
        return f"{limit}, as Ray did not place its bundle: {misfit.why}"

    def _end(self, rank: int) -> None:
        life = self.lives[rank]
        life.is_over = True
        life.task.cancel()
        self._ends[rank] = self.tasks.create_task(self._stop(life))

    async def _stop(self, life: _Life) -> None:
        """End a life: shut its worker down if possible, and kill its actor."""
        await asyncio.wait([life.task])
        if life.handle is None:
            return
        try:
            if life.worker is not None:
                async with asyncio.timeout(self.plan.drain_timeout_s + STOP_S):
                    await life.handle.stop.remote(self.plan.drain_timeout_s)
        except Exception:  # noqa: BLE001, S110  (dead, or too slow)
            pass
        finally:
            await self.plan.bundles.kill(life.handle)


def _why(error: BaseException) -> str:
    """Return the short text of an error of Ray."""
    cause = getattr(error, "cause", None)  # the error of the actor's method
    shown = cause if isinstance(cause, AsyncRpcError) else error
    # Ray lists the ids of the actor in lines that begin with a tab.
    lines = [line for line in str(shown).splitlines() if not line.startswith("\t")]
    text = " ".join(" ".join(lines).split()) or type(shown).__name__
    return text[:WHY_CHARACTERS_MAX]
