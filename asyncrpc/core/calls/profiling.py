"""Calls in torch's profiler: a range at the caller, and one at the callee.

Unless a profiler runs, the only cost is a look at `profiler._is_profiler_enabled`,
which torch itself keeps for this: 10 ns.

A range begins when a call is made, or its function begins, and ends with the answer.
Ranges of calls that overlap do so in the trace: none is the other's parent.

Source: torch.distributed.rpc, for the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
from torch.autograd import profiler

from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.calls.inbound import InboundCall
from asyncrpc.core.calls.modes import Mode, Target

_IN_THREADS: Final = frozenset({Mode.THREAD, Mode.ASYNC_EXECUTION})


def show_call(call: CallFuture[Any], kind: str, caller: str) -> None:
    """Show a call as a range from now to its answer."""
    shown = profiler.record_function(
        f"rpc_{kind}#{call.function}({caller} -> {call.to})"
    )
    shown.__enter__()  # type: ignore[no-untyped-call]
    # On the loop, and so in the thread that is profiled, if not all are.
    call.add_done_callback(lambda _: shown.__exit__(None, None, None))


def show_function(
    inbound: InboundCall, target: Target, *, caller: str, callee: str
) -> Target:
    """Show a function that a peer has called; return what is run in its place.

    If the profiler sees only the thread of the event loop, the range is in that thread,
    also for functions that run in others.
    """
    name = f"rpc_run#{target.name}({caller} -> {callee})"
    sees_loop_only = torch._C._autograd._profiler_enabled()  # noqa: SLF001
    if target.mode in _IN_THREADS and not sees_loop_only:
        return Target(target.name, _shown(target.function, name), target.mode)
    inbound.shown = profiler.record_function(name)
    inbound.shown.__enter__()  # type: ignore[no-untyped-call]
    return target


def _shown(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with profiler.record_function(name):
            return function(*args, **kwargs)

    return run
