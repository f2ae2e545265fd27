"""`spawn`, for programs written for `torch.multiprocessing.spawn`: over `launch`.

Source: torch/multiprocessing/spawn.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Literal, TypeVarTuple, overload

from asyncrpc.core.arguments import check_flag
from asyncrpc.core.multiprocessing.launcher import (
    Method,
    check_method,
    check_task,
    launch,
)
from asyncrpc.core.multiprocessing.processes import Processes

Ts = TypeVarTuple("Ts")


@overload
def spawn(
    fn: Callable[[int, *Ts], object],
    args: tuple[*Ts] = ...,
    nprocs: int = 1,
    join: Literal[True] = True,  # noqa: FBT002  torch's order, for its callers
    daemon: bool = False,  # noqa: FBT001, FBT002
    start_method: Method = "spawn",
) -> None: ...
@overload
def spawn(
    fn: Callable[[int, *Ts], object],
    args: tuple[*Ts] = ...,
    nprocs: int = 1,
    *,
    join: Literal[False],
    daemon: bool = False,
    start_method: Method = "spawn",
) -> Processes[None]: ...
def spawn(  # noqa: PLR0917  torch's order, for its callers
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    join: bool = True,  # noqa: FBT001, FBT002
    daemon: bool = False,  # noqa: FBT001, FBT002
    start_method: Method = "spawn",
) -> Processes[None] | None:
    """Run `fn(i, *args)` in each of `nprocs` new processes, as torch's `spawn` does.

    It is `launch` with torch's signature: the result of `fn` is dropped, and the
    rendezvous is left to the program, which sets MASTER_ADDR and MASTER_PORT itself.
    Unlike in torch, each process uses `max(1, floor(cores / nprocs))` threads, and no
    process outlives this one.

    Args:
        fn: a function at the top level of a module; a coroutine function runs on an
            event loop of its process.
        args: its arguments after the index; tensors are shared, as by `launch`.
        nprocs: the number of processes.
        join: wait for the end; otherwise return at once.
        daemon: stop the processes when this program ends, instead of waiting for them;
            they cannot start others.
        start_method: `spawn` or `forkserver`.

    Returns:
        None; with `join=False` the running processes, whose `join` works as that of
        torch's context.

    Raises:
        ProcessFailedError: a process failed; the error names the first one, with its
            traceback.  The others have been stopped.
        UsageError: as for `launch`.

    Example:
        >>> def train(rank: int, model: nn.Module) -> None: ...
        >>> if __name__ == "__main__":
        ...     asyncrpc.multiprocessing.spawn(train, args=(model,), nprocs=4)

    Source: torch.multiprocessing.spawn; there a failure is a ProcessRaisedException or
    a ProcessExitedException.
    """
    check_task(fn, args, nprocs)
    check_method("start_method", start_method)
    check_flag("join", join)
    processes = launch(
        partial(_run, fn),
        args,
        nprocs,
        method=start_method,
        daemon=daemon,
        host_store=False,
        join=False,
    )
    if not join:
        return processes
    processes.wait()
    return None


def _run(fn: Callable[..., object], rank: int, *args: Any) -> Any:
    result = fn(rank, *args)
    return _awaited(result) if inspect.iscoroutine(result) else None


async def _awaited(coroutine: Coroutine[Any, Any, object]) -> None:
    await coroutine
