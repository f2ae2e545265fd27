"""A worker that announces itself as a replica, with its load and its end.

`Replicas` call the workers that have entered a `Replica`.  Each reports its load with
its answers, gets calls only when it is ready, and can drain: routers then send it no
further call, and the running calls end.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from types import NoneType, TracebackType
from typing import Any, Self

from asyncrpc import current_worker
from asyncrpc.core.arguments import (
    check_above,
    check_callable,
    check_flag,
    check_kind,
    check_timeout,
    is_seconds,
    shown,
)
from asyncrpc.core.calls.context import current_call_var
from asyncrpc.core.worker import Worker
from asyncrpc.errors import NotStartedError, UsageError
from asyncrpc.extend import ServiceHost, host_of
from asyncrpc.serving.replicas.messages import ReplicaStatement
from asyncrpc.serving.replicas.service import ReplicaService, service_of
from asyncrpc.serving.weights.served_model import ServedModel
from asyncrpc.serving.weights.service import serve_weights

logger = logging.getLogger("asyncrpc")


class Replica:
    """Announces a worker as a replica; an asynchronous context manager.

    At the end of the block it drains, unless the block raised.

    Example:
        >>> async with Worker("model-0") as worker, serving.Replica(worker) as replica:
        ...     await told_to_end.wait()
    """

    def __init__(
        self,
        worker: Worker | None = None,
        *,
        load: Callable[[], float] | None = None,
        model: ServedModel[Any] | None = None,
        weight: float = 1.0,
        ready: bool = True,
        drain_timeout_s: float | None = None,
    ) -> None:
        """Describe the replica; `async with` announces it.

        Args:
            worker: the worker that runs the functions; None: the current one.
            load: returns the load, a number of at least 0; it must be quick, as it is
                called for each answer.  None: the number of calls that are served or
                wait here.
            model: the served model: publishers bring it new weights, and routers are
                told its version.
            weight: its share of the calls, relative to other replicas; a host with
                twice the speed may get twice the weight.
            ready: whether it takes calls at once.  False: from `make_ready` on.
            drain_timeout_s: seconds that calls here have to end at the end of the
                block; None: as in the worker's options.

        Raises:
            UsageError: an argument has the wrong type, or is out of range.
        """
        if worker is not None:
            check_kind("worker", worker, Worker, "a Worker or None")
        if load is not None:
            check_callable("load", load)
        wanted = "a ServedModel or None"
        check_kind("model", model, (ServedModel, NoneType), wanted)
        check_above("weight", weight, 0)
        if math.isinf(weight):
            raise UsageError("weight must be finite")
        check_flag("ready", ready)
        check_timeout("drain_timeout_s", drain_timeout_s)
        self._worker = worker
        self._load = load
        self._model = model
        self._weight = float(weight)
        self._drain_timeout_s = drain_timeout_s
        self._begins_ready = ready
        self._ready_at_s: float | None = None
        self._is_draining = False
        self._load_failed = False
        self._service: ReplicaService | None = None
        self._host: ServiceHost | None = None  # once it has been entered

    async def __aenter__(self) -> Self:
        """Announce the replica.

        Raises:
            NotStartedError: the worker does not run, or there is no current worker.
            UsageError: this object was entered before, the worker is a replica already,
                or this is not the worker's event loop.
        """
        worker = self._worker = self._worker or current_worker()
        host = host_of(worker)
        host.check_on_loop("a Replica")
        service = service_of(host)
        if self._service is not None:
            raise UsageError("a Replica is entered once; make a new one")
        if service.statement is not None:
            raise UsageError(f"worker {worker.name!r} is a replica already")
        self._service, self._host = service, host
        service.replica = self
        service.statement = self._statement
        host.note_of = self._note
        if self._model is not None:
            serve_weights(host, self._model)
            self._model.weights.on_changed = service.tell_watchers
        if self._begins_ready:
            self.make_ready()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Drain; if the block raised, only announce the end.

        Cancellation:
            Calls that run here are not waited for.
        """
        assert self._worker is not None  # it was entered
        if self._worker.is_closed:
            return
        host_of(self._worker).check_on_loop("a Replica")
        if error is None:
            await self.drain(self._drain_timeout_s)
        else:
            self._say_draining()

    def make_ready(self) -> None:
        """Take calls from now on.

        Raises:
            NotStartedError: the replica has not been entered.
        """
        worker, service = self._entered()
        if self._ready_at_s is None:
            self._ready_at_s = worker.loop.time()
            service.tell_watchers()

    @property
    def is_draining(self) -> bool:
        """Whether the replica takes no further calls."""
        return self._is_draining

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no further calls of routers, and wait until none runs here.

        A function that another worker has called may drain its own worker; its own call
        is not waited for.  Routers are told at once, and confirm when they have no more
        calls here.  Calls that are on their way are still served, and so are direct
        calls of other workers.  Draining cannot be undone.

        Args:
            timeout_s: seconds to wait; None: as in the worker's options.

        Returns:
            Whether all calls have ended.

        Raises:
            NotStartedError: the replica has not been entered, or the worker has ended.
            UsageError: `timeout_s` is not a number of seconds, or this is not the
                worker's event loop.

        Cancellation:
            It stays draining; calls run on.
        """
        check_timeout("timeout_s", timeout_s)
        worker, _ = self._entered()
        host = host_of(worker)
        host.check_on_loop("Replica.drain")
        if timeout_s is None:
            timeout_s = worker.options.drain_timeout_s
        answers = self._say_draining()
        try:
            async with asyncio.timeout(timeout_s):
                if answers:
                    await asyncio.wait(answers)  # afterwards no call is on its way
                await host.wait_idle(but=_calls_here(host))
        except TimeoutError:
            logger.warning(
                "worker %r: %d calls had not ended %g s after it began to drain",
                worker.name,
                host.active,
                timeout_s,
            )
            return False
        return True

    def _say_draining(self) -> list[asyncio.Future[Any]]:
        """Tell all routers; return their confirmations that no call is left here."""
        _, service = self._entered()
        self._is_draining = True
        return service.tell_watchers()

    def _entered(self) -> tuple[Worker, ReplicaService]:
        if self._worker is None or self._service is None:
            raise NotStartedError("use `async with serving.Replica(worker)` first")
        host_of(self._worker)  # raises unless it runs
        return self._worker, self._service

    # --- what it reports -------------------------------------------------------------

    def _statement(self) -> ReplicaStatement:
        assert self._worker is not None  # it was entered
        model, ready_at_s = self._model, self._ready_at_s
        now_s = self._worker.loop.time()
        return ReplicaStatement(
            is_ready=ready_at_s is not None,
            is_draining=self._is_draining or self._worker.is_draining,
            age_s=0.0 if ready_at_s is None else now_s - ready_at_s,
            load=self._load_now(),
            weight=self._weight,
            canary=0.0 if model is None else model.canary,
            version=None if model is None else model.version,
        )

    def _note(self, version: Any) -> list[Any]:
        """Return the note of an answer, with what its function has told."""
        assert self._worker is not None  # it was entered
        is_draining = self._is_draining or self._worker.is_draining
        return [self._load_now(), is_draining, version]

    def _load_now(self) -> float:
        """Return the load; if the program's function fails, the number of calls."""
        assert self._worker is not None  # it was entered
        assert self._host is not None
        if self._load is not None:
            try:
                return _checked_load(self._load())
            except Exception:  # of the program's function; the answer must be sent
                if not self._load_failed:
                    self._load_failed = True
                    logger.exception(
                        "worker %r: its `load` failed; the number of its calls is"
                        " reported instead",
                        self._worker.name,
                    )
        return float(self._host.active)


def _checked_load(load: object) -> float:
    if not is_seconds(load) or not 0 <= load < math.inf:
        raise UsageError(f"load must return a number, not {shown(load)}")
    return float(load)


def _calls_here(host: ServiceHost) -> int:
    """Return 1 if this is part of a call that the worker serves, else 0."""
    call = current_call_var.get()
    if call is None or not call.is_running:
        return 0
    return int(call.pool is host.pool)


async def drain(timeout_s: float | None = None) -> bool:
    """Drain the replica of the current worker; see `Replica.drain`.

    Another worker may call it: `await worker.peer("model-0").call(serving.drain)`; it
    returns when all other calls there have ended.

    Args:
        timeout_s: seconds to wait; None: as in the worker's options.

    Returns:
        Whether all calls have ended.

    Raises:
        NotStartedError: no worker runs here, or it is not a replica.
        UsageError: `timeout_s` is not a number of seconds.

    Cancellation:
        It stays draining; calls run on.
    """
    check_timeout("timeout_s", timeout_s)
    worker = current_worker()
    replica = service_of(host_of(worker)).replica
    if replica is None:
        raise NotStartedError(
            f"worker {worker.name!r} is not a replica; use `async with"
            " serving.Replica(worker)` first"
        )
    return await replica.drain(timeout_s)
