"""The worker with all its parts, and the functions that act on the current worker.

Only this module joins references, autograd and the optimizer to the runtime.  The
functions have the names, the argument order and the meaning of torch.distributed.rpc;
those that wait are awaitable.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any

from asyncrpc.core import worker as core
from asyncrpc.core.arguments import UNSET, check_flag, check_kind, check_timeout, wrong
from asyncrpc.core.autograd.contexts import Context
from asyncrpc.core.autograd.modes import ThreadModes
from asyncrpc.core.autograd.public import backward as backward_from
from asyncrpc.core.autograd.public import check_context
from asyncrpc.core.autograd.service import AutogradService
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.calls.futures import CallFuture, refuse_on_loop
from asyncrpc.core.ids import WorkerInfo
from asyncrpc.core.membership.rendezvous import Rendezvous
from asyncrpc.core.options import Options, options_within
from asyncrpc.core.parts import Parts
from asyncrpc.core.rref.handle import RRef
from asyncrpc.core.rref.records import RRefRecord
from asyncrpc.core.rref.service import RRefService
from asyncrpc.core.services.extensions import Service
from asyncrpc.core.services.registry import OBSERVATION
from asyncrpc.core.services.schema import LOOKERS
from asyncrpc.core.worker import (
    current_worker,
    leave_running,
    workers_left_running,
)
from asyncrpc.errors import AlreadyStartedError
from asyncrpc.tools.inspection.presence import HostPresence


class Worker(core.Worker):
    """A participant: it calls functions on others and runs functions for them.

    An asynchronous context manager that owns every task, socket and thread it starts.
    It is a value: one process may hold many.

    Attributes:
        parts: the components of the worker, for packages built on workers; they may
            change with any version.

    Example:
        >>> async with asyncrpc.Worker("trainer0", rank=0, world_size=3) as worker:
        ...     y = await worker.peer("ps").call(fn, x, lr=0.1)
        ...     rref = worker.peer("ps").remote(Table, 1000, 64)
    """

    @staticmethod
    def _extend(parts: Parts) -> None:
        add_services(parts)

    def rrefs(self) -> list[RRefRecord]:
        """List the references that this worker owns or holds, the oldest first.

        On the owner a record names the holders; elsewhere, the handles and their users.

        Raises:
            NotStartedError: this worker is not running.
        """
        self.parts.lifecycle.check_running()
        references = self.parts.references
        assert isinstance(references, RRefService)
        return references.records()


def add_services(
    parts: Parts, *, autograd_class: type[AutogradService] = AutogradService
) -> None:
    """Add references, autograd, the optimizer, collectives and inspection to a worker.

    The last three are loaded when they are first used.

    Args:
        autograd_class: of its autograd; a facade has its own.
    """
    references = RRefService(parts)
    autograd = autograd_class(parts)
    references.backward_from = _backward_from(parts)
    parts.references = parts.calls.references = references
    parts.propagators.append(autograd)
    parts.calls.thread_states.append(ThreadModes())
    parts.services.add(references)
    parts.services.add(autograd)
    parts.services.add_later(
        "optim", "asyncrpc.core.optim.service", partial(_optimizers, parts, autograd)
    )
    parts.services.add_later(
        "collectives",
        "asyncrpc.parallel.collectives.service",
        partial(_collectives, parts),
    )
    parts.services.add_later(
        "rendezvous",
        "asyncrpc.parallel.collectives.payload_exchange",
        partial(_rendezvous, parts),
    )
    _add_observation(parts)


def _add_observation(parts: Parts) -> None:
    """Let programs look at a worker."""
    parts.services.add(HostPresence(parts))
    parts.services.add_later(
        "inspection",
        "asyncrpc.tools.inspection.service",
        partial(_inspection, parts),
        by=LOOKERS,
    )


OBSERVATION.append(_add_observation)  # also of the workers of torch's backend


def _optimizers(parts: Parts, autograd: AutogradService) -> Service:
    from asyncrpc.core.optim.service import OptimizerService  # noqa: PLC0415  (on demand)

    return OptimizerService(parts, autograd)


def _collectives(parts: Parts) -> Service:
    from asyncrpc.parallel.collectives.service import CollectivesService  # noqa: PLC0415

    return CollectivesService(parts)


def _rendezvous(parts: Parts) -> Service:
    from asyncrpc.parallel.collectives.payload_exchange import (  # noqa: PLC0415
        RendezvousService,
    )

    return RendezvousService(parts, parts.barriers)


def _inspection(parts: Parts) -> Service:
    from asyncrpc.tools.inspection.references import references_seen  # noqa: PLC0415
    from asyncrpc.tools.inspection.service import InspectionService  # noqa: PLC0415

    if isinstance(parts.references, RRefService):
        return InspectionService(parts, partial(references_seen, parts.references))
    return InspectionService(parts)


def _backward_from(parts: Parts) -> Callable[..., Any]:
    """Return the function that runs a backward pass from a referenced tensor."""

    async def backward(
        handle: RRef[Any], context: Context, *, retain_graph: bool
    ) -> None:
        check_context(context)
        check_flag("retain_graph", retain_graph)
        if handle.is_owner():
            root = await handle
            await backward_from(context, root, retain_graph)
            return
        await parts.calls.start_call(
            handle.owner_name(), _backward_here, (handle, context.id, retain_graph)
        )

    return backward


async def _backward_here(
    handle: RRef[Any],
    context_id: Sequence[int],
    retain_graph: bool,  # noqa: FBT001
) -> None:
    """Run a backward pass for another worker, from a tensor of this one."""
    autograd: Any = current_worker().parts.service("autograd")
    root = await handle
    await backward_from(autograd.context_of(context_id), root, retain_graph)


class _Starting:
    """The result of `init_rpc`: await it, or enter it with `async with`."""

    __slots__ = ("_worker",)

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    def __await__(self) -> Generator[Any, None, Worker]:
        return self._start().__await__()

    async def _start(self) -> Worker:
        worker = await self._worker.__aenter__()
        # Awaited directly, the start ran in the caller's own context: the worker is
        # current there until `shutdown`.  No block ends it, so it outlasts its task.
        leave_running(worker)
        return worker

    async def __aenter__(self) -> Worker:
        return await self._worker.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self._worker.__aexit__(kind, error, traceback)


def init_rpc(
    name: str | None = None,
    backend: None = None,
    rank: int | None = None,
    world_size: int | None = None,
    options: Options | None = None,
    *,
    rendezvous: str | Mapping[str, str | Sequence[str]] | Rendezvous = "env://",
) -> _Starting:
    """Start a worker and make it the current worker of this task.

    `await` it, or use it as `async with`.  A worker that was awaited runs until
    `shutdown`, and is current in tasks and threads without one of their own, such as
    the next cells of a notebook: see `current_worker`.

    Args:
        name: name of the worker, unique in the group; None: `worker` and the rank.
        backend: must be None; it only keeps torch's order of arguments.
        rank: rank of the worker, from 0; None takes it from `rendezvous`.
        world_size: number of workers; None takes it from `rendezvous`.
        options: limits, times, secret, policy.
        rendezvous: as for `Worker`.

    Returns:
        An awaitable context manager that starts and returns the `Worker`.

    Raises:
        AlreadyStartedError: this task already has a current worker, or `init_rpc` has
            started one of this name on this event loop.
        RendezvousTimeoutError: when awaited: some workers did not appear in time.
        UsageError: an argument is missing or wrong; the message says which.

    Source: torch.distributed.rpc.init_rpc.
    """
    if backend is not None:
        raise wrong("backend", "left out: asyncrpc has only one", backend)
    present = current_worker_var.get()
    if present is not None and not present.is_closed:
        raise _already(present, "in this task")
    worker = Worker(
        name,
        rank=rank,
        world_size=world_size,
        rendezvous=rendezvous,
        options=options,
    )
    for running in workers_left_running():
        if running.name == worker.name:
            raise _already(running, "on this event loop")
    return _Starting(worker)


def _already(worker: core.Worker, where: str) -> AlreadyStartedError:
    return AlreadyStartedError(
        f"worker {worker.name!r} already runs {where}: current_worker() returns it, "
        "and `await asyncrpc.shutdown(graceful=False)` ends it, alone; for several "
        "workers in one process use asyncrpc.Worker"
    )


async def shutdown(graceful: bool = True, timeout_s: float | None = None) -> None:  # noqa: FBT001, FBT002
    """End the current worker; by default together with the group.

    Args:
        graceful: first wait until every worker of the group has called `shutdown` and
            no call is in flight anywhere; see `Worker.shutdown`.  Otherwise end alone,
            after the calls in flight here.
        timeout_s: seconds until the worker ends in any case; None: no limit on the wait
            for the others, and `Options.drain_timeout_s` for calls in flight.

    Raises:
        NotStartedError: this task has no current worker.
        UsageError: an argument has a wrong type; the worker still runs.
        TimeoutError: `timeout_s` passed before all workers had called `shutdown` and
            all calls had ended; the message names the workers.  This worker has ended
            anyway.

    Cancellation:
        The worker is ended at once, then the cancellation is raised.

    Source: torch.distributed.rpc.shutdown; unlike there, the wait ignores workers that
    have died.
    """
    worker = current_worker()
    worker.parts.check_on_loop("shutdown")
    check_flag("graceful", graceful)
    check_timeout("timeout_s", timeout_s)
    try:
        if graceful:
            await worker.shutdown(graceful=True, timeout_s=timeout_s)
        else:
            await worker.shutdown(drain_timeout_s=timeout_s)
    finally:
        current_worker_var.set(None)


def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: Any = UNSET,
) -> CallFuture[Any]:
    """Start a call and return its future: await it, or `wait()` for it in a thread.

    Args:
        to: name, rank or `WorkerInfo` of the callee.
        func: the function to run; see `Peer.call`.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout_s: seconds; None: no limit; left out: `Options.rpc_timeout_s`.

    Returns:
        A future.  Cancelling it cancels the call.

    Raises:
        NotStartedError: this task has no current worker.
        UnknownWorkerError: no worker has the name or rank `to`.
        EncodeError: an argument cannot be sent.

    Thread safety: call it on the loop, or in a thread that runs a function for a call.

    Source: torch.distributed.rpc.rpc_async.
    """
    worker = current_worker()
    options = options_within(timeout_s)
    _check_arguments(args, kwargs)
    return worker.parts.start_call(
        _name(worker, to), func, args, kwargs, options=options, with_site=True
    )


def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: Any = UNSET,
) -> Any:
    """Call a function and block this thread until its result has arrived.

    For plain functions, which run in threads.  The thread counts as waiting, so chains
    of blocking calls never run out of threads.

    Args:
        to: name, rank or `WorkerInfo` of the callee.
        func: the function to run.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout_s: seconds; None: no limit; left out: `Options.rpc_timeout_s`.

    Returns:
        What the function returned.

    Raises:
        UsageError: called on an event loop, which it would block: `await rpc_async`.
        Exception: as for `rpc_async`, and any error of the call.

    Source: torch.distributed.rpc.rpc_sync.
    """
    refuse_on_loop("rpc_sync", "use `await asyncrpc.rpc_async(...)`")
    return rpc_async(to, func, args, kwargs, timeout_s).wait()


def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    timeout_s: Any = UNSET,
) -> RRef[Any]:
    """Start a call whose result stays on the callee; return an RRef to it at once.

    Args:
        to: name, rank or `WorkerInfo` of the callee, which becomes the owner.
        func: the function or class that makes the value there.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout_s: seconds in which the value must be made; None: no limit.

    Returns:
        The reference; an error of `func` is raised when the reference is used.

    Raises:
        NotStartedError: this task has no current worker.
        UnknownWorkerError: no worker has the name or rank `to`.
        EncodeError: an argument cannot be sent.

    Source: torch.distributed.rpc.remote.
    """
    worker = current_worker()
    _check_arguments(args, kwargs)
    rref: RRef[Any] = worker.parts.start_remote(
        _name(worker, to), func, args, kwargs, options=options_within(timeout_s)
    )
    return rref


def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and rank of a worker; by default of the current worker.

    Raises:
        NotStartedError: this task has no current worker.
        UnknownWorkerError: no worker has this name.

    Source: torch.distributed.rpc.get_worker_info.
    """
    worker = current_worker()
    if worker_name is None:
        worker_name = worker.name
    check_kind("worker_name", worker_name, str, "the name of a worker, or None")
    member = worker.parts.directory.member(worker_name)
    return WorkerInfo(member.name, member.rank)


def _check_arguments(args: Any, kwargs: Any) -> None:
    """Raise UsageError unless these are valid arguments of a call."""
    if type(args) is not tuple and not isinstance(args, (tuple, list)):
        raise wrong("args", "a tuple or a list", args)
    if kwargs is not None:
        check_kind("kwargs", kwargs, Mapping, "a mapping from names to values, or None")
        for name in kwargs:
            check_kind("a name in kwargs", name, str, "a string")


def _name(worker: core.Worker, to: str | int | WorkerInfo) -> str:
    if isinstance(to, str):
        return to
    if isinstance(to, WorkerInfo):
        return to.name
    return worker.parts.directory.member(to).name
