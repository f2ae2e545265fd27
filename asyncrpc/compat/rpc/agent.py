"""The worker of this process, and what every function of the facade asks it for.

Futures are completed in threads, as their callbacks may make calls, and block: one
after the other by one thread, in the order in which their calls have ended.  A callback
of the program may block in that thread, and even wait for a later future: so if a job
has waited for two ticks, another thread takes part.  If many calls end together this
takes 5 us of processor time for each; a thread for each would take 16.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch

from asyncrpc.api import Worker
from asyncrpc.compat.rpc import errors
from asyncrpc.compat.rpc.constants import UNSET_RPC_TIMEOUT
from asyncrpc.compat.rpc.gathering import ProfiledThreads
from asyncrpc.compat.rpc.options import TensorPipeRpcBackendOptions, WorkerInfo
from asyncrpc.compat.rpc.promises import Promise
from asyncrpc.core.arguments import is_seconds, wrong
from asyncrpc.core.calls.context import forget_deadline
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.hosting import LoopThread
from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.loop.threads import Job, Submit, start_thread
from asyncrpc.core.options import options_within
from asyncrpc.errors import AsyncRpcError, CallError, ClosedError, EncodeError

TICK_S: Final = 0.002


class Completions:
    """Runs short jobs, which complete futures, in as few threads as they need."""

    def __init__(self, submit: Submit, loop: asyncio.AbstractEventLoop) -> None:
        self._submit = submit
        self._loop = loop
        self._jobs: deque[Job] = deque()
        self._job_count = 0  # number of jobs so far
        self._job_count_before = 0  # at the last tick
        self._threads = 0  # threads of the pool that work on them
        self._is_starting = False  # one more thread; the pool may have no free one
        self._timer: asyncio.TimerHandle | None = None

    def run(self, job: Job) -> None:
        """Run a job in a thread; on the loop."""
        self._jobs.append(job)
        self._job_count += 1
        if not self._threads:
            self._start()
        if self._timer is None:
            self._job_count_before = 0
            self._timer = self._loop.call_later(TICK_S, self._on_tick)

    def finish(self) -> None:
        """Run the remaining jobs in a separate thread, as the loop has ended."""
        if self._jobs:
            self._work_apart()

    def _start(self) -> None:
        """Start one more thread."""
        self._is_starting = True
        try:
            self._submit(self._work, self._ended)
        except AsyncRpcError:  # the worker is ending, but a thread may be waiting
            self._work_apart()
        else:
            self._threads += 1

    def _work(self) -> None:
        self._is_starting = False
        jobs = self._jobs
        while True:
            try:
                job = jobs.popleft()
            except IndexError:
                return
            job()

    def _work_apart(self) -> None:
        start_thread(threading.Thread(target=self._work, daemon=True))

    def _ended(self, _result: object, error: BaseException | None) -> None:
        self._threads -= 1
        if issubclass(type(error), ClosedError):  # the job never ran
            self._work_apart()
        elif self._jobs and not self._threads:
            self._start()

    def _on_tick(self) -> None:
        """Start one more thread if a job has waited since the last tick."""
        waiting = len(self._jobs)
        if not waiting:
            self._timer = None
            return
        if self._job_count - waiting < self._job_count_before and not self._is_starting:
            self._start()
        self._job_count_before = self._job_count
        self._timer = self._loop.call_later(TICK_S, self._on_tick)


_POLL_S: Final = 0.01  # between looks at the calls in flight, for `join`
CONTEXT_BITS: Final = 48  # of an id of a context; above them is the rank

_PLAIN: Final = frozenset({type(None), bool, int, float, str, torch.Tensor})

_within = lru_cache(options_within)  # a program has few timeouts, for many calls

_lock = threading.Lock()
_current: Agent | None = None


def _by_name_and_rank(infos: Sequence[WorkerInfo]) -> dict[str | int, WorkerInfo]:
    known: dict[str | int, WorkerInfo] = {info.name: info for info in infos}
    return known | {info.id: info for info in infos}


class Agent:
    """One worker, its loop's thread, and how torch would call what it knows.

    Attributes:
        worker: of asyncrpc.
        host: of its loop.
        options: as the program gave them; `rpc_timeout` may change.
        is_static_group: whether the workers are known from the start.
        store: where they have met.
        context_ids: for new autograd contexts.
        profiled: wishes for what profilers see of callees.
    """

    def __init__(
        self,
        worker: Worker,
        host: LoopThread,
        options: TensorPipeRpcBackendOptions,
        store: Any,
        names: Sequence[str] | None,
    ) -> None:
        """Begin with a worker that has not been started.

        Args:
            names: of the workers of a static group, by rank; None: it may grow.
        """
        self.worker = worker
        self.host = host
        self.options = options
        self.store = store
        self.is_static_group = names is not None
        self.context_ids = itertools.count(max(worker.rank, 0) << CONTEXT_BITS)
        # Of references and of their forks, as torch counts them: for people to read.
        self.reference_ids = itertools.count()
        self.named_references: WeakKeyDictionary[Any, tuple[int, int]]
        self.named_references = WeakKeyDictionary()  # by what their handles share
        self.rpc_timeout_s: float = options.rpc_timeout
        self.shows_gil_wait = False
        self.all_gather: Callable[..., dict[str, Any]]  # set before it is current
        # Of a static group, by name and by rank.  Not what is known of its members: one
        # may be gone before another has begun, and all have to wait for the same ones.
        infos = [WorkerInfo(name, rank) for rank, name in enumerate(names or ())]
        self._infos = _by_name_and_rank(infos)
        self.is_let_go = False  # all references, for the worker ends
        self._completions = Completions(
            # The pool is there once the worker has started.
            lambda job, done: worker.parts.pool.submit(job, done),  # noqa: PLW0108
            host.loop,
        )
        self.profiled = ProfiledThreads(worker)
        worker.parts.thread_states.insert(
            0, self.profiled
        )  # next to the function itself

    # --- who is there ----------------------------------------------------------------

    @property
    def rank(self) -> int:
        """Of this worker."""
        return self.worker.rank

    def get_worker_info(self, to: str | int | WorkerInfo | None = None) -> WorkerInfo:
        """Return the name and the rank of a worker; by default those of this one.

        Raises:
            RuntimeError: there is no such worker.
        """
        if to is None:
            return WorkerInfo(self.worker.name, self.worker.rank)
        if isinstance(to, WorkerInfo):
            return to
        info = self._known().get(to)
        if info is not None:
            return info
        which = "id" if isinstance(to, int) else "name"
        raise RuntimeError(
            f"name:{self.worker.name},rank:{self.rank} could not find destination "
            f"{which} {to}"
        )

    def get_worker_infos(self) -> list[WorkerInfo]:
        """Return every worker, this one and those that left a static group too."""
        return [info for key, info in self._known().items() if isinstance(key, str)]

    def gone_of(self, names: set[str]) -> list[str]:
        """Return which of some workers are not there any more; all, after the end."""
        if self.worker.is_closed:
            return sorted(names)
        return sorted(names - {member.name for member in self.worker.known_members})

    def _get_device_map(self, dst: WorkerInfo) -> dict[torch.device, torch.device]:
        """Return the options' device map for a worker, which may be empty."""
        return dict(self.options.device_maps.get(dst.name, {}))

    def _get_backend_options(self) -> TensorPipeRpcBackendOptions:
        return self.options

    def _update_group_membership(self, *_: object) -> None:
        """Do nothing: asyncrpc's members know who joins and who leaves."""

    def _known(self) -> dict[str | int, WorkerInfo]:
        if self._infos:
            return self._infos
        members = self.worker.known_members
        return _by_name_and_rank(
            [WorkerInfo(member.name, member.id) for member in members]
        )

    def rank_of(self, name: str) -> int:
        """Return the rank of a worker, -1 if the name is unknown."""
        info = self._known().get(name)
        return -1 if info is None else info.id

    def get_metrics(self) -> dict[str, str]:
        """Return figures about calls and threads, as texts."""
        return self.get_debug_info()

    def get_debug_info(self) -> dict[str, str]:
        """Return figures about calls and threads, as texts."""
        threads = self.worker.options.threads
        idle = max(threads - self.worker.parts.pool.unfinished, 0)
        waits = {"agent.gil_average_wait_time_us": "0"} if self.shows_gil_wait else {}
        return {
            **waits,
            "agent.num_idle_threads": str(idle),
            "agent.thread_pool_size": str(threads),
            "agent.server_active_calls": str(self.worker.parts.active),
            "agent.server_active_async_calls": "0",
            "agent.client_active_calls": str(self._calls_in_flight()),
        }

    def _calls_in_flight(self) -> int:
        """Return the number of calls that this worker makes."""
        return sum(len(link.pending) for link in self.worker.parts.directory.links)

    def reference_figures(self) -> dict[str, str]:
        """Return figures about references, as texts; on the loop."""
        owned = forks = pending = 0
        for record in self.worker.rrefs():
            if record.is_owner and record.holders:  # only values that others refer to
                owned += 1
                forks += sum(record.holders.values())
            elif record.state == "pending":
                pending += 1
        return {
            "num_owner_rrefs": str(owned),
            "num_forks": str(forks),
            "num_pending_users": str(pending),
            "num_pending_futures": "0",
        }

    # --- calls -----------------------------------------------------------------------

    def limit_s(self, timeout: float) -> float | None:
        """Return the timeout for asyncrpc from one of torch's, where 0 means no limit.

        Raises:
            TypeError: the timeout is not a number, as torch has it; nothing began.
        """
        # None, which torch refuses, too, has long been taken for no limit here.
        if not (timeout is None or isinstance(timeout, bool) or is_seconds(timeout)):
            raise TypeError(str(wrong("timeout", "a number of seconds", timeout)))
        if timeout == UNSET_RPC_TIMEOUT:
            timeout = self.rpc_timeout_s
        return timeout or None

    def start(
        self,
        to: str,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        limit_s: float | None,
    ) -> CallFuture[Any]:
        """Start a call; on the loop, in the context of the thread that calls."""
        forget_deadline()
        options = _within(limit_s)
        return self.worker.parts.start_call(to, function, args, kwargs, options=options)

    def result_of(self, start: Callable[[], Any], limit_s: float | None = None) -> Any:
        """Start a call, block until it ends, and return its result.

        Args:
            start: starts it, on the loop.
            limit_s: seconds that it may take all in all, arguments that are slow to
                pickle included.

        Raises:
            Exception: what it raised, as `rpc_sync` raises it.
        """
        begun_s = now_s()
        try:
            result = self.host.do(start)
            if limit_s is None or now_s() - begun_s <= limit_s:
                return result
            failed: BaseException = errors.timed_out(limit_s)
        except BaseException as error:  # noqa: BLE001  (every one is translated)
            failed = errors.of_future(error, self.rank_of)
        return errors.raised(failed)

    def cannot_fail(
        self,
        function: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> bool:
        """Return whether a call can be started without waiting for how that goes.

        Its function has been called before, and its arguments can travel and cannot
        change on the way.  (torch, too, sends a tensor's memory as it is then.)
        """
        values = (*args, *kwargs.values())
        is_known = self.worker.parts.is_known(function)
        return is_known and _PLAIN.issuperset(map(type, values))

    def future(
        self,
        start: Callable[[], CallFuture[Any]],
        limit_s: float | None = None,
        *,
        waits: bool = True,
    ) -> torch.futures.Future[Any]:
        """Start a call; return a future of torch's.

        It completes in a thread of the worker's, not on the loop: what waits for it may
        call on, and wait for that.

        Args:
            start: starts the call, on the loop.
            limit_s: seconds that it may take all in all, as for `result_of`.
            waits: whether to wait until it is started; else its future says how that
                went.

        Raises:
            Exception: the call could not be started.
        """
        promise = Promise(self, start, limit_s)
        if not waits:
            self.host.soon(promise.begin_or_fail)
            return promise.future
        try:
            self.host.do_at_once(promise.begin)
        except BaseException as error:  # noqa: BLE001  (every one is translated)
            if isinstance(error, CallError) and not isinstance(error, EncodeError):
                promise.fail_here(error)  # it is the callee's: its future says so
                return promise.future
            failed = errors.of_call(error, self.rank_of)
        else:
            return promise.future
        return errors.raised(failed)  # type: ignore[no-any-return]

    def in_thread(self, job: Callable[[], object]) -> None:
        """Run a job that completes a future in a thread; on the loop."""
        self._completions.run(job)

    # --- life ------------------------------------------------------------------------

    def sync(self) -> None:
        """Do nothing, as torch: `join` waits for the others."""

    def join(
        self,
        shutdown: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
        timeout: float = 0,
    ) -> None:
        """Wait until all workers have called this and no call is in flight anywhere.

        Args:
            shutdown: whether to end the worker then.
            timeout: seconds; 0: no limit.

        Raises:
            RuntimeError: the others did not come in time, or one is gone.
        """
        if shutdown:
            is_static, limit_s = self.is_static_group, timeout or None
            self.shutdown(graceful=is_static, timeout_s=limit_s, drains=True)
            return
        tick, in_flight = threading.Event(), 1
        while in_flight:
            while self._calls_in_flight():
                tick.wait(_POLL_S)
            counts = self.all_gather(self._calls_in_flight(), timeout=timeout)
            in_flight = sum(counts.values())

    def shutdown(
        self,
        *,
        graceful: bool = False,
        timeout_s: float | None = None,
        drains: bool = False,
    ) -> None:
        """End the worker, its loop and the thread; do nothing if it has ended.

        Args:
            graceful: together with the group.
            timeout_s: for all of it; None: no limit.
            drains: if it ends alone: after the calls in flight here.

        Raises:
            RuntimeError: others did not come in time.
        """
        if self.worker.is_closed:
            return
        try:
            if graceful:
                self.host.run(self.worker.shutdown(graceful=True, timeout_s=timeout_s))
            else:
                drain_s = timeout_s if drains else 0.0
                self.host.run(self.worker.shutdown(drain_timeout_s=drain_s))
        except TimeoutError as error:
            raise RuntimeError(str(error)) from error
        finally:
            self.host.stop()
            self._completions.finish()


def print_raised(error: BaseException) -> None:
    """Print what a function of a call has raised, where the process prints now."""
    traceback.print_exception(error, file=sys.stderr)


# --- the agent of this process -------------------------------------------------------


def current() -> Agent:
    """Return the agent of this process."""
    if _current is None:
        raise RuntimeError(errors.NOT_INITIALIZED)
    return _current


def is_set() -> bool:
    """Return whether there is an agent."""
    return _current is not None


def set_current(agent: Agent) -> None:
    """Make an agent that of this process."""
    global _current  # noqa: PLW0603  (the one state of the process)
    with _lock:
        if _current is not None:
            raise RuntimeError("RPC is already initialized")
        _current = agent


def reset_current() -> None:
    """Forget the agent."""
    global _current  # noqa: PLW0603
    with _lock:
        _current = None


@atexit.register
def _stop_at_exit() -> None:
    """End the loop's thread, of a program that has not shut down.

    It is registered at import, so it comes after what the program has registered.
    """
    if _current is not None:
        _current.host.stop()
