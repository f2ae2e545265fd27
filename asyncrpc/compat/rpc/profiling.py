"""Calls in torch's profilers, in the threads that make them.

A call is a range, from its start to its end.  If the thread asks for them, the answer
brings the ranges of the callee: see `gathering`.

Without a profiler, the only cost is `is_on`.

Source: torch.distributed.rpc, for the names of the ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, Self, TypeVar

import torch
from torch._jit_internal import _qualified_name
from torch.autograd import profiler
from torch.jit import _builtins

from asyncrpc.compat.rpc import agent as agents
from asyncrpc.compat.rpc.agent import Agent
from asyncrpc.compat.rpc.gathering import (
    Opened,
    ProfilingRequest,
    Range,
    Session,
    gatherer_here,
)
from asyncrpc.core.calls.context import forget_deadline
from asyncrpc.core.calls.repeating import is_idempotent
from asyncrpc.core.options import CallOptions

Arguments = tuple[Sequence[Any], Mapping[str, Any]]


class CreatedReference(Protocol):
    """A reference to a value that a call makes."""

    _profiled: torch.futures.Future[None]

    def _get_future(self) -> torch.futures.Future[Any]:
        """Return a future that completes when the owner has the value."""


M = TypeVar("M", bound=CreatedReference)

_is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled  # noqa: SLF001
find_builtin: Callable[[Any], str | None] = _builtins._find_builtin  # noqa: SLF001


def is_on() -> bool:
    """Return whether a profiler runs for this thread or the process."""
    return profiler._is_profiler_enabled or _is_profiled()  # noqa: SLF001


def sync(
    agent: Agent,
    to: str,
    function: Callable[..., Any],
    arguments: Arguments,
    limit_s: float | None,
) -> Any:
    """Make a call of `rpc_sync` with a range; raise as `rpc_sync`."""
    with _Shown("sync", function, agent, to) as shown:
        return agent.result_of(lambda: shown.start(arguments, limit_s), limit_s)


def future(
    agent: Agent,
    to: str,
    function: Callable[..., Any],
    arguments: Arguments,
    limit_s: float | None,
) -> torch.futures.Future[Any]:
    """Make a call of `rpc_async` with a range; raise as `rpc_async`."""
    with _Shown("async", function, agent, to) as shown:
        waits = not agent.cannot_fail(function, *arguments)
        start = lambda: shown.start(arguments, limit_s)  # noqa: E731  (on the loop)
        return shown.until(agent.future(start, limit_s, waits=waits))


def remote(
    agent: Agent,
    to: str,
    function: Callable[..., Any],
    start: Callable[[], Any],
    make: Callable[[Callable[[], Any]], M],
) -> M:
    """Make a call of `remote` with a range; raise as `remote`."""
    with _Shown("remote", function, agent, to) as shown:
        rref = make(shown.wishing(start))
        shown.follow(rref)
    return rref


class _Shown:
    """A range from the start of a call to its end."""

    def __init__(
        self, kind: str, function: Callable[..., Any], agent: Agent, to: str
    ) -> None:
        name = f"rpc_{kind}#{_name_of(function)}({agent.worker.name} -> {to})"
        gatherer = gatherer_here()
        self._agent = agent
        self._to = to
        self._function = function
        self._is_async = kind != "sync"
        self._asked = (
            ProfilingRequest(gatherer, name, agent.worker) if gatherer else None
        )
        # A function that runs for a gathering caller may end before its calls: so the
        # profiler does not show these.
        is_recorded = not isinstance(gatherer, Session)
        self._range = profiler.record_function(name) if is_recorded else None

    def __enter__(self) -> Self:
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *_: object) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)

    def until(self, future: torch.futures.Future[Any]) -> torch.futures.Future[Any]:
        """End the range with a future, not with the block."""
        if self._range is None:
            return future
        ended: torch.futures.Future[Any] = self._range._call_end_callbacks_on_future(  # noqa: SLF001
            future
        )
        self._range = None
        # The value of some failed futures is the error, which they raise.
        ended._set_unwrap_func(lambda _value: future.wait())  # noqa: SLF001
        return ended

    def start(self, arguments: Arguments, limit_s: float | None) -> Any:
        """Start the call; on the loop."""
        agent, to, function, asked = self._agent, self._to, self._function, self._asked
        if asked is None or is_idempotent(function):
            return agent.start(to, function, *arguments, limit_s)
        forget_deadline()
        worker = agent.worker
        target, values = worker.parts.describe(function, *arguments)
        name = target or str(getattr(function, "__qualname__", function))
        call = worker.parts.new_call(name.rpartition(":")[2], to)
        call.options = CallOptions(timeout_s=limit_s)
        meta = {**worker.parts.meta_here(), **asked.meta(keep=False)}
        worker.parts.begin(call, target, values, timeout_s=limit_s, meta=meta)
        return Opened(call, asked, is_async=self._is_async)

    def wishing(self, start: Callable[[], Any]) -> Callable[[], Any]:
        """Return a function that starts a call of `remote`, with the wish if any."""
        asked, threads = self._asked, self._agent.profiled
        if asked is None:
            return start

        def wish() -> Any:
            with threads.wishing(asked):
                return start()

        return wish

    def follow(self, rref: CreatedReference) -> None:
        """End the range when a value is made; then ask for the ranges."""
        asked, agent, to = self._asked, self._agent, self._to
        if asked is None:
            return
        gathered: torch.futures.Future[None] = torch.futures.Future()

        def take(answer: torch.futures.Future[list[Range]]) -> None:
            asked.take(_value_of(answer), is_async=True)
            gathered.set_result(None)

        def ask(_value: object) -> None:
            limit_s = agent.rpc_timeout_s or None
            start = lambda: agent.start(to, _kept, (asked.token,), {}, limit_s)  # noqa: E731
            agent.future(start, limit_s, waits=False).add_done_callback(take)

        self.until(rref._get_future()).add_done_callback(ask)  # noqa: SLF001
        rref._profiled = gathered  # noqa: SLF001


def _value_of(answer: torch.futures.Future[list[Range]]) -> list[Range]:
    try:
        return answer.value()
    except Exception:  # noqa: BLE001  (the value is there, or says itself why not)
        return []


def _kept(token: str) -> list[Range]:
    """Return the ranges that are kept here for a caller."""
    return agents.current().profiled.take_kept(token)


def _name_of(function: Callable[..., Any]) -> str:
    if isinstance(function, torch.jit.ScriptFunction):
        return str(_qualified_name(function))
    name = getattr(function, "__qualname__", None) or repr(function)
    return str(find_builtin(function) or name)
