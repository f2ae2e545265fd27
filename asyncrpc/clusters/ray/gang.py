"""A gang: workers that Ray places, and that are restarted and ended together."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Final, Literal, Self

from asyncrpc import DeviceOptions, LocalRendezvous, Options, Peer
from asyncrpc.api import Worker
from asyncrpc.clusters.presence import Presence
from asyncrpc.clusters.ray.actor import (
    GangWorker,
    NodeListener,
    WorkerOrder,
    main_module,
)
from asyncrpc.clusters.ray.changes import Announcer, GangChange, GangChanges
from asyncrpc.clusters.ray.cluster import (
    Bundles,
    Handle,
    check_bundles,
    node_address,
)
from asyncrpc.clusters.ray.conductor import Conductor, GangPlan
from asyncrpc.clusters.ray.machine.supervisor import (
    GangSupervisor,
    RestartScope,
)
from asyncrpc.clusters.remote.options import STRATEGIES
from asyncrpc.clusters.restarts import RestartLimits
from asyncrpc.core.arguments import (
    check_choice,
    check_count,
    check_duration,
    check_kind,
    check_sequence,
    check_text,
    check_timeout,
    wrong,
)
from asyncrpc.errors import (
    AlreadyStartedError,
    GangError,
    GangLostError,
    GangPlacementError,
    NotStartedError,
    UsageError,
)

_SECRET_BYTES: Final = 32  # as long as the hash of the HMAC that proves it
_LONGEST_SUFFIX: Final = len("-driver")


@dataclass(frozen=True, slots=True, kw_only=True)
class _GangSettings:
    """The arguments of a gang, checked."""

    bundles: Sequence[Mapping[str, float]]
    name: str
    names: Sequence[str]
    strategy: str
    restart: str
    limits: RestartLimits
    worker: Worker | None
    options: Options
    runtime_env: Mapping[str, Any] | None
    start_timeout_s: float
    drain_timeout_s: float

    def __post_init__(self) -> None:
        check_bundles(self.bundles)
        check_sequence("names", self.names, "a sequence of names, or None")
        if len(self.names) != len(self.bundles) or len(set(self.names)) < len(
            self.names
        ):
            wanted = f"{len(self.bundles)} different names, one for each bundle"
            raise wrong("names", wanted, self.names)
        for name in self.names:
            check_text("each of names", name)
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("restart", self.restart, [scope.value for scope in RestartScope])
        check_kind("limits", self.limits, RestartLimits, "a RestartLimits or None")
        check_kind("worker", self.worker, (Worker, type(None)), "a Worker or None")
        check_kind("options", self.options, Options, "an Options or None")
        wanted = "a mapping, as Ray takes it, or None"
        env_kinds = (Mapping, type(None))
        check_kind("runtime_env", self.runtime_env, env_kinds, wanted)
        check_duration("start_timeout_s", self.start_timeout_s)
        check_duration("drain_timeout_s", self.drain_timeout_s)
        if self.options.membership != "dynamic":
            raise UsageError(
                'options.membership must be "dynamic": workers of a gang join the'
                " driver's worker, now and after a loss"
            )
        if self.worker is not None:
            _check_driver(self.worker, self.options)

    @property
    def secret(self) -> bytes:
        """The secret of the driver's worker, or a fresh one."""
        options = self.options if self.worker is None else self.worker.options
        return options.secret_bytes or secrets.token_hex(_SECRET_BYTES).encode()


def _check_driver(worker: Worker, options: Options) -> None:
    """Refuse a driver's worker that no worker of a gang could reach."""
    if worker.is_closed:
        raise NotStartedError(
            f"the driver's worker {worker.name!r} must run: enter it before the gang"
        )
    if worker.rank >= 0:
        raise UsageError(
            f"the driver's worker {worker.name!r} has rank {worker.rank}, but ranks are"
            " for the workers of the gang; make it without one:"
            " Worker(name, rendezvous=LocalRendezvous(1))"
        )
    if worker.options.secret_bytes is None:
        raise UsageError(
            f"the driver's worker {worker.name!r} has no secret, so workers on other"
            " nodes cannot join it: give it Options(secret=...), or leave `worker` out"
        )
    if options.secret is not None:
        raise UsageError(
            "options must have no secret if `worker` is given: the gang uses that"
            " worker's"
        )


class Gang:
    """Workers on a Ray cluster: a placement group, and an actor for each worker.

    An asynchronous context manager.  Ray places, starts and ends the workers; calls
    go from worker to worker by asyncrpc and do not pass through Ray.  The workers have
    the ranks 0 to n - 1; the driver's worker, which admits them, has no rank.

    Thread safety:
        Use it on the event loop that entered it.
    """

    def __init__(
        self,
        bundles: Sequence[Mapping[str, float]],
        *,
        name: str = "gang",
        names: Sequence[str] | None = None,
        strategy: str = "PACK",
        restart: Literal["gang", "worker"] = "gang",
        limits: RestartLimits | None = None,
        worker: Worker | None = None,
        options: Options | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        start_timeout_s: float = 120.0,
        drain_timeout_s: float = 0.0,
    ) -> None:
        """Describe a gang; `async with` starts it.

        Args:
            bundles: what Ray reserves for each worker, such as `{"CPU": 1, "GPU": 1}`.
            name: of the gang and its placement group; two gangs that run at once in
                one namespace of Ray need two.
            names: of the workers; None: `name-0`, `name-1` and so on.
            strategy: how Ray places the bundles: `PACK`, `SPREAD`, `STRICT_PACK` or
                `STRICT_SPREAD`.
            restart: what is restarted if a worker is lost: `"gang"`, all workers, as a
                new generation; or `"worker"`, only that worker.
            limits: how often the gang restarts, and how soon; None: `RestartLimits()`.
            worker: the driver's worker, which must run and have a secret; None: the
                gang starts one, `name-driver`.
            options: of the gang's workers.  If they have a secret, the gang uses it;
                otherwise it makes a new one.
            runtime_env: of the actors, as Ray takes it.
            start_timeout_s: seconds that the start of a worker may take, its placement
                included.
            drain_timeout_s: seconds that calls in flight have when a worker is ended.

        Raises:
            UsageError: an argument is out of range or has the wrong type.
            NotStartedError: `worker` does not run.
        """
        check_text("name", name, at_most=255 - _LONGEST_SUFFIX)
        if names is None:
            check_sequence("bundles", bundles, "a sequence of resources")
            names = [f"{name}-{rank}" for rank in range(len(bundles))]
        self._settings = _GangSettings(
            bundles=bundles,
            name=name,
            names=names,
            strategy=strategy,
            restart=restart,
            limits=limits if limits is not None else RestartLimits(),
            worker=worker,
            options=options if options is not None else Options(),
            runtime_env=runtime_env,
            start_timeout_s=start_timeout_s,
            drain_timeout_s=drain_timeout_s,
        )
        self._announcer = Announcer()
        self._stack = AsyncExitStack()
        self._conductor: Conductor | None = None
        self._driver: Worker | None = None

    # --- life ------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Reserve the bundles, and start the workers; return once all can be called.

        Raises:
            GangPlacementError: Ray did not place the bundles within `start_timeout_s`;
                the error names those that do not fit.
            GangError: a worker did not start.
            AlreadyStartedError: the gang has been entered before.
            UsageError: Ray is not installed or not initialized, or refuses the bundles;
                or another gang of this namespace of Ray has the same name.

        Cancellation:
            Everything that was started is ended.
        """
        if self._driver is not None:
            raise AlreadyStartedError(
                f"the gang {self.name!r} has been entered before; make another"
            )
        try:
            await self._enter()
        except BaseException as error:
            await self._stack.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def _enter(self) -> None:
        settings, secret = self._settings, self._settings.secret
        self._announcer.bind()
        bundles = Bundles(settings.bundles, settings.strategy)
        self._driver = driver = await self._enter_driver(secret)
        self._stack.push_async_callback(bundles.remove)
        await bundles.reserve(settings.name)
        tasks = asyncio.TaskGroup()
        await tasks.__aenter__()
        # An error of the block is not one of these tasks: it must not be wrapped.
        self._stack.push_async_callback(tasks.__aexit__, None, None, None)
        presence = Presence(driver.members_changed(), self._on_gone)
        self._conductor = conductor = Conductor(
            GangPlan(
                orders=self._orders(driver, secret),
                bundles=bundles,
                runtime_env=settings.runtime_env,
                start_timeout_s=settings.start_timeout_s,
                drain_timeout_s=settings.drain_timeout_s,
            ),
            GangSupervisor(
                len(settings.bundles),
                scope=RestartScope(settings.restart),
                limits=settings.limits,
            ),
            self._announcer,
            presence,
            tasks,
        )
        for work in (presence.follow(), conductor.run()):
            self._stack.callback(tasks.create_task(work).cancel)
        self._stack.push_async_callback(conductor.finish)
        await self._until_running(0)

    def _on_gone(self, name: str, incarnation: int, why: str) -> None:
        if self._conductor is not None:
            self._conductor.on_gone(name, incarnation, why)

    async def _enter_driver(self, secret: bytes) -> Worker:
        settings = self._settings
        if settings.worker is not None:
            return settings.worker
        options = replace(
            settings.options,
            secret=secret,
            devices=DeviceOptions(),  # the driver's node need not have the workers'
            network=replace(settings.options.network, listen=None, advertise=None),
        )
        listener = NodeListener()
        self._stack.callback(listener.close)
        driver = Worker(
            f"{settings.name}-driver",
            rendezvous=LocalRendezvous(1),
            options=listener.options(options, node_address()),
        )
        return await self._stack.enter_async_context(driver)

    def _orders(self, driver: Worker, secret: bytes) -> list[WorkerOrder]:
        settings, main = self._settings, main_module()
        return [
            WorkerOrder(
                name=name,
                rank=rank,
                world_size=len(settings.names),
                contact=driver.addresses,
                options=replace(settings.options, secret=None),
                main=main,
                secret=secret,
            )
            for rank, name in enumerate(settings.names)
        ]

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the workers, their actors and the placement group."""
        await self._stack.__aexit__(kind, error, traceback)

    # --- its workers -----------------------------------------------------------------

    @property
    def name(self) -> str:
        """The gang's name."""
        return self._settings.name

    @property
    def worker(self) -> Worker:
        """The driver's worker.

        Raises:
            NotStartedError: the gang has not been entered.
        """
        self._running()
        assert self._driver is not None
        return self._driver

    @property
    def generation(self) -> int:
        """Number of the last generation that ran, from 1; 0 before the first."""
        return self._announcer.running

    @property
    def peers(self) -> list[Peer]:
        """The workers, by rank, as seen from the driver's worker.

        Raises:
            NotStartedError: the gang has not been entered.
        """
        return [self.worker.peer(name) for name in self._settings.names]

    def peer(self, rank: int) -> Peer:
        """Return one worker.  A call reaches its present incarnation.

        Args:
            rank: from 0.

        Raises:
            UsageError: rank is not a rank of the gang.
            NotStartedError: the gang has not been entered.
        """
        check_count("rank", rank, at_most=len(self._settings.names) - 1)
        return self.worker.peer(self._settings.names[rank])

    @property
    def workers(self) -> list[GangWorker]:
        """The workers that run now, by rank: incarnation, process and node of each.

        Between a loss and the next generation some are missing.

        Raises:
            NotStartedError: the gang has not been entered.
        """
        lives = self._running().present
        return [life.worker for life in lives if life.worker is not None]

    @property
    def actors(self) -> list[Handle]:
        """Ray's handles of the actors of these workers, by rank.

        `await handle.run.remote(function, *args)` runs `await function(worker, *args)`
        in the actor through Ray, which then counts references in the result.

        Raises:
            NotStartedError: the gang has not been entered.
        """
        lives = self._running().present
        return [life.handle for life in lives if life.worker is not None]

    def _running(self) -> Conductor:
        if self._conductor is None:
            raise NotStartedError(f"the gang {self.name!r} must be entered first")
        return self._conductor

    # --- its changes -----------------------------------------------------------------

    def changes(self) -> GangChanges:
        """Return an iterator over the changes of the gang from now on.

        Example:
            >>> async for change in gang.changes():
            ...     print(change.kind, change.generation, change.why)
        """
        return self._announcer.changes()

    async def changed(
        self, since: int | None = None, timeout_s: float | None = None
    ) -> int:
        """Wait for a newer generation, and return its number.

        Args:
            since: the last generation that the caller knows; 0: none; None: the last
                one that has run.
            timeout_s: seconds to wait; None: no limit.

        Raises:
            GangLostError: the gang failed; no newer generation will follow.
            NotStartedError: the gang has ended, or has not been entered.
            TimeoutError: `timeout_s` passed.
            UsageError: an argument is out of range or has the wrong type, or another
                event loop runs here.

        Cancellation:
            Only the waiting ends.

        Example:
            >>> generation = await gang.changed(generation)
        """
        check_timeout("timeout_s", timeout_s)
        if since is None:
            since = self.generation
        check_count("since", since, at_most=self.generation)
        if self.worker.is_closed:  # in a forked child, too
            raise self._ended()
        self._announcer.check_loop("Gang.changed")
        async with asyncio.timeout(timeout_s):
            return await self._until_running(since)

    async def _until_running(self, since: int) -> int:
        changes = self._announcer.changes()
        while True:
            if self._announcer.failure is not None:
                raise self._failed(self._announcer.failure)
            if self._announcer.is_over:
                raise self._ended()
            if self._announcer.running > since:
                return self._announcer.running
            await anext(changes, None)

    def _ended(self) -> NotStartedError:
        return NotStartedError(f"the gang {self.name!r} has ended")

    def _failed(self, change: GangChange) -> GangError:
        subject = f"the gang {self.name!r}"
        misfits = self._running().failure.misfits
        gang, generation = self.name, change.generation
        if generation == 1 and misfits is not None:
            return GangPlacementError(
                f"{subject} was not placed: {change.why}",
                gang=gang,
                generation=generation,
                bundles=misfits,
            )
        if generation == 1 and self.generation == 0:
            problem = f"{subject} did not start: {change.why}"
            return GangError(problem, gang=gang, generation=generation)
        problem = (
            f"{subject} lost workers, and RestartLimits allows no further restart"
            f" (restarts_max={self._settings.limits.restarts_max}): {change.why}"
        )
        return GangLostError(problem, gang=gang, generation=generation)
