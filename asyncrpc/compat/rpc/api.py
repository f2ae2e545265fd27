"""Calls, references and shutdown, as torch.distributed.rpc.api has them.

Programs (and torch's own tests) replace some of these functions: so the functions look
each other up in this module, at the time of the call.

Source: torch.distributed.rpc.api.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc import profiling
from asyncrpc.compat.rpc.agent import Agent
from asyncrpc.compat.rpc.constants import DEFAULT_SHUTDOWN_TIMEOUT, UNSET_RPC_TIMEOUT
from asyncrpc.compat.rpc.internal import (
    PythonUDF,
    RPCExecMode,
    _build_rpc_profiling_key,
    _internal_rpc_pickler,
    pickled_call,
)
from asyncrpc.compat.rpc.options import WorkerInfo
from asyncrpc.compat.rpc.rref import RRef, start_creation
from asyncrpc.compat.rpc.rref_proxy import add_apis
from asyncrpc.compat.rpc.store_lock import locked_at
from asyncrpc.core.calls.context import forget_deadline
from asyncrpc.core.calls.futures import LOOK_S
from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.options import options_within

__all__ = [
    "AllGatherStates",
    "PythonUDF",
    "RRef",
    "_build_rpc_profiling_key",
    "get_worker_info",
    "method_factory",
    "new_method",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
]

logger = logging.getLogger(__name__)

PyRRef = RRef  # torch's base class in C++
P = ParamSpec("P")
R = TypeVar("R")

_ignore_rref_leak = True
_default_pickler: Any = _internal_rpc_pickler
_thread_local_var = threading.local()
_get_should_profile = profiling.is_on


def _require_initialized(function: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        agents.current()
        return function(*args, **kwargs)

    return checked


def _get_current_rpc_agent() -> Agent:
    return agents.current()


def _is_current_rpc_agent_set() -> bool:
    return agents.is_set()


def get_rpc_timeout() -> float:
    """Return the default timeout, in seconds.

    Raises:
        RuntimeError: RPC has not been initialized.
    """
    return agents.current().rpc_timeout_s


@contextlib.contextmanager
def _use_rpc_pickler(rpc_pickler: Any) -> Iterator[None]:
    """Send functions and arguments by another pickler for a while."""
    global _default_pickler  # noqa: PLW0603  (torch's name for it)
    _default_pickler = rpc_pickler
    try:
        yield
    finally:
        _default_pickler = _internal_rpc_pickler


# --- calls ---------------------------------------------------------------------------


def _to_worker_info(to: Any) -> WorkerInfo:
    if isinstance(to, WorkerInfo):
        return to
    if isinstance(to, str | int):
        return agents.current().get_worker_info(to)
    raise ValueError(f"Cannot get WorkerInfo from name {to}")


@_require_initialized
def get_worker_info(worker_name: str | None = None) -> WorkerInfo:
    """Return the name and rank of a worker; by default of this worker.

    Raises:
        RuntimeError: the name is unknown.

    Source: torch.distributed.rpc.get_worker_info.
    """
    return _get_current_rpc_agent().get_worker_info(worker_name)


def _check_callable(func: Any) -> None:
    if not callable(func):
        raise TypeError("function should be callable.")


def _pickled(
    func: Any, args: Any, kwargs: Any
) -> tuple[Any, Sequence[Any] | None, Mapping[str, Any] | None]:
    """Return a call as the program's pickler packs it; torch's own functions as is."""
    is_named = isinstance(func, torch.jit.ScriptFunction) or profiling.find_builtin(
        func
    )
    if is_named:
        return func, args, kwargs
    return *pickled_call(_default_pickler, func, args or (), kwargs or {}), None


@_require_initialized
def rpc_sync(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> Any:
    """Call a function and block until its result has arrived.

    Args:
        to: name, rank or info of the callee.
        func: the function to run: importable on the callee, or a bound method of an
            object that can be pickled.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout: seconds; 0: no limit; -1: the timeout of the options.

    Raises:
        RuntimeError: the call timed out, the callee is lost, or the function raised an
            exception other than a ValueError or a TypeError.
        Exception: a ValueError or a TypeError, as the function raised it.

    Source: torch.distributed.rpc.rpc_sync.
    """
    _check_callable(func)
    agent, name = agents.current(), _to_worker_info(to).name
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    values, named = args or (), kwargs or {}
    limit_s = agent.limit_s(timeout)
    if profiling.is_on():
        return profiling.sync(agent, name, func, (values, named), limit_s)
    return agent.result_of(
        lambda: agent.start(name, func, values, named, limit_s), limit_s
    )


@_require_initialized
def rpc_async(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Start a call and return its future.

    Callbacks of the future run in a thread, and may make other calls.

    Args:
        to: this and the others, as for `rpc_sync`.
        func: the function to run.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout: seconds.

    Raises:
        Exception: an argument cannot be sent.

    Source: torch.distributed.rpc.rpc_async.
    """
    future = _invoke_rpc(to, func, RPCExecMode.ASYNC, args, kwargs, timeout)
    if hasattr(_thread_local_var, "future_list"):
        _thread_local_var.future_list.append(future)
    return future


def _invoke_rpc(  # noqa: PLR0917  (torch's signature)
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    rpc_type: RPCExecMode,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    rpc_timeout: float = UNSET_RPC_TIMEOUT,
) -> torch.futures.Future[Any]:
    """Start a call and return its future, which `_wait_all` does not know."""
    _ = rpc_type  # as a profiler shows it in torch; here all are calls of `rpc_async`
    _check_callable(func)
    agent, name = agents.current(), _to_worker_info(to).name
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    values, named = args or (), kwargs or {}
    limit_s = agent.limit_s(rpc_timeout)
    if profiling.is_on():
        return profiling.future(agent, name, func, (values, named), limit_s)
    return agent.future(
        partial(agent.start, name, func, values, named, limit_s),
        limit_s,
        waits=not agent.cannot_fail(func, values, named),
    )


@_require_initialized
def remote(
    to: str | int | WorkerInfo,
    func: Callable[..., Any],
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> RRef[Any]:
    """Start a call whose result stays on the callee; return a reference to it at once.

    Args:
        to: this and the others, as for `rpc_sync`.
        func: makes the value.
        args: its arguments.
        kwargs: its keyword arguments.
        timeout: seconds in which the value must be made.

    Raises:
        Exception: an argument cannot be sent.

    Source: torch.distributed.rpc.remote.
    """
    _check_callable(func)
    agent, name = agents.current(), _to_worker_info(to).name
    kind: Any = func
    if _default_pickler is not _internal_rpc_pickler:
        func, args, kwargs = _pickled(func, args, kwargs)
    values, named = args or (), kwargs or {}

    def start() -> Any:
        forget_deadline()
        limit_s = agent.limit_s(timeout)
        options = options_within(limit_s)
        return agent.worker.parts.start_remote(
            name, func, values, named, options=options
        )

    waits = not agent.cannot_fail(func, values, named)
    make = partial(start_creation, agent, timeout=timeout, waits=waits)
    if profiling.is_on():
        rref = profiling.remote(agent, name, func, start, make)
    else:
        rref = make(start)
    plain: Any = object.__new__  # its result is an instance of the class
    if type(kind) is type and kind.__new__ is plain:
        rref._made_of = kind  # noqa: SLF001  (so that no proxy has to ask for it)
    return rref


add_apis(rpc_sync=rpc_sync, rpc_async=rpc_async, remote=remote)


@contextlib.contextmanager
def _wait_all() -> Iterator[None]:
    """Wait at the end for every future that `rpc_async` returns inside."""
    _thread_local_var.future_list = []
    try:
        yield
    finally:
        try:
            torch.futures.wait_all(_thread_local_var.future_list)
        finally:
            del _thread_local_var.future_list


def _rref_typeof_on_owner(
    rref: RRef[Any],
    blocking: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
) -> Any:
    kind = type(rref.local_value())
    if blocking:
        return kind
    future: torch.futures.Future[type] = torch.futures.Future()
    future.set_result(kind)
    return future


def _rref_typeof_on_user(
    rref: RRef[Any],
    timeout: float = UNSET_RPC_TIMEOUT,
    blocking: bool = True,  # noqa: FBT001, FBT002
) -> Any:
    future = rpc_async(
        rref.owner(), _rref_typeof_on_owner, args=(rref,), timeout=timeout
    )
    return future.wait() if blocking else future


def method_factory(method_name: str, docstring: str) -> Callable[..., Any]:
    """Return a function that calls a method of a reference."""

    def method(self: RRef[Any], *args: Any, **kwargs: Any) -> Any:
        return getattr(self, method_name)(*args, **kwargs)

    method.__doc__ = docstring
    return method


# What torch's loop over the methods of RRef leaves behind: editors have imported it in
# programs that never use it.
method_name, method = "to_here", RRef.to_here
docstring = str(method.__doc__)
new_method = method_factory(method_name, docstring)


# --- all workers together ------------------------------------------------------------


class AllGatherStates:
    """The values gathered in one round, and whether they are complete."""

    def __init__(self) -> None:
        self.gathered_objects: dict[str, Any] = {}
        self.proceed_signal = threading.Event()


_ALL_WORKER_NAMES: set[str] = set()
_all_gather_dict_lock = threading.RLock()
_all_gather_sequence_id: dict[str, int] = {}
_all_gather_sequence_id_to_states: defaultdict[str, AllGatherStates] = defaultdict(
    AllGatherStates
)


def _init_rpc_states(agent: Agent) -> None:
    global _ALL_WORKER_NAMES  # noqa: PLW0603  (torch's name for it)
    _ALL_WORKER_NAMES = {info.name for info in agent.get_worker_infos()}
    if not agents.is_set():
        agents.set_current(agent)


def _gather_to_leader(
    sequence_id: str, worker_name: str, obj: Any, worker_names: set[str] | None = None
) -> None:
    with _all_gather_dict_lock:
        wanted = worker_names or _ALL_WORKER_NAMES
        if worker_name not in wanted:
            raise AssertionError(f"{worker_name} is not expected by leader.")
        states = _all_gather_sequence_id_to_states[sequence_id]
        if worker_name in states.gathered_objects:
            raise AssertionError(
                f"{worker_name} reported intent sequence id {sequence_id} twice. "
            )
        states.gathered_objects[worker_name] = obj
        if wanted == set(states.gathered_objects):
            states.proceed_signal.set()


def _broadcast_to_followers(sequence_id: str, objects_map: dict[str, Any]) -> None:
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    if states.proceed_signal.is_set():
        raise AssertionError(
            f"Termination signal sequence id {sequence_id} got set twice."
        )
    states.gathered_objects = objects_map
    states.proceed_signal.set()


@_require_initialized
def _all_gather(
    obj: Any,
    worker_names: set[str] | None = None,
    timeout: float = UNSET_RPC_TIMEOUT,
) -> dict[str, Any]:
    """Give each worker the values of all workers, by name.

    Each sends its value to the worker whose name is first, which sends all of them to
    all workers.

    Source: torch's `_all_gather`, which waits for ever for a worker that has died.
    """
    names = worker_names or _ALL_WORKER_NAMES
    leader, me = min(names), _get_current_rpc_agent().get_worker_info().name
    with _all_gather_dict_lock:
        key = "".join(sorted(names))
        number = _all_gather_sequence_id.get(key, 0)
        _all_gather_sequence_id[key] = number + 1
    sequence_id = f"{key}{number}"
    limit_s, wait_s = timeout, timeout or None
    if timeout == UNSET_RPC_TIMEOUT:
        limit_s, wait_s = _get_current_rpc_agent().rpc_timeout_s, None
    if me == leader:
        _gather_to_leader(sequence_id, me, obj, names)
    else:
        rpc_sync(
            leader, _gather_to_leader, (sequence_id, me, obj, names), timeout=limit_s
        )
    with _all_gather_dict_lock:
        states = _all_gather_sequence_id_to_states[sequence_id]
    _await_signal(states.proceed_signal, names, wait_s)
    if me == leader:
        _tell_followers(sequence_id, states, names - {leader}, limit_s)
    with _all_gather_dict_lock:
        return _all_gather_sequence_id_to_states.pop(sequence_id).gathered_objects


def _await_signal(
    signal: threading.Event, names: set[str], wait_s: float | None
) -> None:
    """Wait until all values have been gathered, or the time is over."""
    agent, left_s = _get_current_rpc_agent(), float("inf") if wait_s is None else wait_s
    while not signal.wait(min(LOOK_S, left_s)) and left_s > LOOK_S:
        left_s -= LOOK_S
        gone = agent.gone_of(names)
        if gone and not signal.is_set():  # the last value may just have arrived
            raise RuntimeError(f"_all_gather cannot end: these are gone: {gone}")


class _FollowerRaisedError(RuntimeError):
    """A follower has answered with an error: it was there."""


def _tell_followers(
    sequence_id: str, states: AllGatherStates, followers: set[str], limit_s: float
) -> None:
    """Send the gathered values to all others."""
    objects = states.gathered_objects
    sent = {
        name: rpc_async(
            name, _broadcast_to_followers, (sequence_id, objects), timeout=limit_s
        )
        for name in followers
    }
    failed: list[tuple[str, RuntimeError]] = []
    for name, future in sent.items():
        try:
            future.wait()
        except RuntimeError as error:
            failed.append((name, error))
    if failed:
        has_answer = any("On WorkerInfo(" in str(error) for _, error in failed)
        kind = _FollowerRaisedError if has_answer else RuntimeError
        raise kind(
            f"Followers {[name for name, _ in failed]} timed out in _all_gather after "
            f"{limit_s:.2f} seconds. The first exception is {failed[0][1]}"
        )


@_require_initialized
def _barrier(worker_names: Any) -> None:
    """Wait until these workers have called this."""
    try:
        _all_gather(None, set(worker_names))
    except RuntimeError:
        logger.exception("Failed to complete barrier")


@_require_initialized
def _wait_all_workers(timeout: float = DEFAULT_SHUTDOWN_TIMEOUT) -> None:
    """Wait until all workers have called this."""
    try:
        _all_gather(None, timeout=timeout)
    except RuntimeError:
        if not agents.current().gone_of(_ALL_WORKER_NAMES):
            logger.exception("Failed to respond to 'Shutdown Proceed' in time")
        raise


# --- the end -------------------------------------------------------------------------


def _delete_all_user_and_unforked_owner_rrefs(timeout: float = 0.0) -> None:
    """Do nothing: all references end with the worker."""
    _ = timeout
    agents.current().is_let_go = True


def _check_leaks(agent: Agent, *, is_ignored: bool) -> None:
    """Refuse to end while others refer to values here, if the program asks for that."""
    if is_ignored or agent.is_let_go:
        return
    figures = agent.host.do_at_once(agent.reference_figures)
    if int(figures["num_owner_rrefs"]):
        raise RuntimeError(
            f"Leaking RRef: {figures['num_owner_rrefs']} values here are still "
            "referred to by other workers"
        )


@_require_initialized
def shutdown(
    graceful: bool = True,  # noqa: FBT001, FBT002  (torch's signature)
    timeout: float = DEFAULT_SHUTDOWN_TIMEOUT,
) -> None:
    """End RPC in this process; by default together with the group.

    Args:
        graceful: wait until every worker has called this and no call is in flight
            anywhere; workers that die meanwhile are left out, with a warning.
        timeout: seconds to wait for the others; 0: no limit.

    Raises:
        RuntimeError: the others did not call this in time.  RPC has ended here.

    Source: torch.distributed.rpc.shutdown.
    """
    agent = agents.current()
    is_graceful, end_s = False, now_s() + (timeout or math.inf)
    try:
        if graceful and agent.is_static_group:
            try:
                _wait_all_workers(timeout)
            except _FollowerRaisedError:
                raise
            except RuntimeError:
                if not agent.gone_of(_ALL_WORKER_NAMES) or now_s() >= end_s:
                    raise
                # These calls need every worker; the waves of the end leave out those
                # that have died, and wait for those that live.
            _delete_all_user_and_unforked_owner_rrefs()
        is_graceful = graceful
        _check_leaks(agent, is_ignored=_ignore_rref_leak)
    finally:
        is_alone = graceful and not agent.is_static_group
        try:
            with locked_at(agent.store) if is_alone else contextlib.nullcontext():
                agent.shutdown(
                    graceful=is_graceful and agent.is_static_group,
                    timeout_s=max(end_s - now_s(), 0.0) if timeout else None,
                    drains=is_alone,
                )
        finally:
            agents.reset_current()


def _finalize_shutdown() -> None:
    """End RPC in this process, without the others."""
    shutdown(graceful=False)
