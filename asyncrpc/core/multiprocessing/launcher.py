"""Start the processes of one host: `launch(fn, nprocs=4)`.

Source: torch.multiprocessing.spawn, whose `fn(rank, *args)` this keeps.  Unlike there,
    results come back, the failure that came first is raised, processes share a secret
    and a rendezvous, each uses its share of the cores, and none outlives its parent.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing import connection, resource_tracker
from multiprocessing.process import (  # type: ignore[attr-defined]  # not in typeshed
    AuthenticationString,
    BaseProcess,
)
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias, TypeVar, TypeVarTuple, overload

import torch.multiprocessing  # noqa: F401  lets tensors in `args` travel as shared memory

from asyncrpc.core.arguments import (
    check_callable,
    check_count,
    check_flag,
    check_kind,
    check_timeout,
    shown,
    wrong,
)
from asyncrpc.core.host.run_entry import ENTRY_VARIABLE, RunEntry, enter_run
from asyncrpc.core.loop.clock import NS_PER_S, Clock, wall_ns
from asyncrpc.core.multiprocessing.arguments import Arguments
from asyncrpc.core.multiprocessing.child import ChildSpec, run_child
from asyncrpc.core.multiprocessing.environment import (
    new_secret,
    process_environment,
    threads_each,
)
from asyncrpc.core.multiprocessing.outcome import Child
from asyncrpc.core.multiprocessing.processes import Processes, Task, refuse_on_loop
from asyncrpc.core.multiprocessing.store import serve_store
from asyncrpc.core.multiprocessing.supervisor import Supervisor
from asyncrpc.errors import UsageError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Method: TypeAlias = Literal["spawn", "forkserver"]

_SWITCH: Final = threading.Lock()  # of multiprocessing's flag, which threads share
_METHODS: Final = ("spawn", "forkserver")
PROCESSES_MAX: Final = 4096  # on one host; each has two descriptors here


@overload
def launch(
    fn: Callable[[int, *Ts], Coroutine[Any, Any, T]],
    args: tuple[*Ts] = ...,
    nprocs: int = 1,
    *,
    method: Method = "spawn",
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    secret: str | None = None,
    host_store: bool = True,
    daemon: bool = False,
    join: Literal[True] = True,
) -> list[T]: ...
@overload
def launch(
    fn: Callable[[int, *Ts], Coroutine[Any, Any, T]],
    args: tuple[*Ts] = ...,
    nprocs: int = 1,
    *,
    method: Method = "spawn",
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    secret: str | None = None,
    host_store: bool = True,
    daemon: bool = False,
    join: Literal[False],
) -> Processes[T]: ...
@overload
def launch(
    fn: Callable[[int, *Ts], T],
    args: tuple[*Ts] = ...,
    nprocs: int = 1,
    *,
    method: Method = "spawn",
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    secret: str | None = None,
    host_store: bool = True,
    daemon: bool = False,
    join: Literal[True] = True,
) -> list[T]: ...
@overload
def launch(
    fn: Callable[[int, *Ts], T],
    args: tuple[*Ts] = ...,
    nprocs: int = 1,
    *,
    method: Method = "spawn",
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    secret: str | None = None,
    host_store: bool = True,
    daemon: bool = False,
    join: Literal[False],
) -> Processes[T]: ...
def launch(
    fn: Callable[..., Any],
    args: tuple[Any, ...] = (),
    nprocs: int = 1,
    *,
    method: Method = "spawn",
    threads_per_process: int | None = None,
    timeout_s: float | None = None,
    secret: str | None = None,
    host_store: bool = True,
    daemon: bool = False,
    join: bool = True,
) -> list[Any] | Processes[Any]:
    """Run `fn(rank, *args)` in each of `nprocs` new processes on this host.

    Each gets the variables that `env://` rendezvous needs (RANK, WORLD_SIZE,
    MASTER_ADDR, ... as torchrun sets them) and one secret, in its environment.  The
    first failure stops the rest: SIGTERM, and after two seconds SIGKILL.  No process
    outlives this one, however it ends.  `asyncrpc status`, `why` and `top` find the
    workers of the processes, as those of `asyncrpc run`.

    Args:
        fn: a function at the top level of a module, since it is sent by name.  A
            coroutine function runs on an event loop of its process.
        args: its arguments after the rank.  Tensors, and the parameters of modules, are
            moved to shared memory, with their gradients, so all processes see writes to
            them.  A tensor without a gradient gets one of its own in each process.
        nprocs: the number of processes.
        method: how they start: `spawn`, or `forkserver`, which starts faster if
            `multiprocessing.set_forkserver_preload` was called.  `fork` is refused: it
            copies locks, thread pools and CUDA contexts in any state.
        threads_per_process: threads that torch uses in each; by default an equal share
            of the cores, at least 1.
        timeout_s: seconds until all processes are stopped; None is no limit.
        secret: the cluster's secret; by default a new one, 256 random bits.  With that,
            workers listen on this host alone, unless their options say where.
        host_store: serve the rendezvous store from here, on loopback.  If it is off,
            MASTER_ADDR and MASTER_PORT are left as they are.
        daemon: stop the processes when this program ends, instead of waiting for them;
            they cannot start others but by `launch`.  An exception that ends the
            program stops them in any case.
        join: wait for the end; otherwise return at once, with a handle to wait on.

    Returns:
        The result of `fn` in each process, by rank, pickled on the way: tensors are
        copies.  With `join=False`, the running processes.

    Raises:
        ProcessFailedError: a process failed; `rank` is the first that did, the message
            has its traceback, and `__cause__` is the exception if it can be pickled.
        DeadlineExceededError: `timeout_s` passed.  All processes have ended.
        UsageError: an argument is out of range or has the wrong type, `fn` or `args`
            cannot be pickled, the main module is not guarded, this would block a
            running event loop, or this is a forked child and the fork server is its
            parent's.  Nothing was started.

    Example:
        >>> def square(rank: int, power: int) -> int:
        ...     return rank**power
        >>> if __name__ == "__main__":
        ...     asyncrpc.multiprocessing.launch(square, args=(2,), nprocs=4)
        [0, 1, 4, 9]

    Source: torch.multiprocessing.spawn.
    """
    check_task(fn, args, nprocs)
    check_method("method", method)
    for name, flag in (("host_store", host_store), ("daemon", daemon), ("join", join)):
        check_flag(name, flag)
    check_timeout("timeout_s", timeout_s)
    check_kind("secret", secret, (str, type(None)), "a string, or None for a new one")
    _refuse_inheriting()
    if join:
        refuse_on_loop("launch(join=True)", "launch(join=False) and wait_async()")
    clock = Clock()
    stop_at_s = None if timeout_s is None else clock.now_s() + timeout_s
    threads = threads_each(nprocs, threads_per_process)
    store = serve_store() if host_store else None
    is_alone = secret is None and host_store
    secret = secret or new_secret()
    entry = enter_run([], nprocs=nprocs, began_s=wall_ns() / NS_PER_S, secret=secret)
    specs = _specs(
        nprocs,
        threads=threads,
        secret=secret,
        is_alone=is_alone,
        store_port=None if store is None else store.port,
        entry=entry,
    )
    try:
        children = _start_all(method, specs, fn, args, daemon=daemon)
    except BaseException:
        if entry is not None:
            entry.remove()
        raise
    processes: Processes[Any] = Processes(
        children,
        Supervisor(nprocs, stop_at_s=stop_at_s),
        task=Task(getattr(fn, "__qualname__", shown(fn)), timeout_s),
        store=store,
        entry=entry,
        clock=clock,
    )
    return processes.wait() if join else processes


def check_task(fn: Any, args: Any, nprocs: Any) -> None:
    """Check the function, its arguments and the number of processes."""
    check_callable("fn", fn)
    _refuse_main_without_file(fn)
    wanted = "a tuple of the arguments after the rank"
    check_kind("args", args, (tuple, list), wanted)
    check_count("nprocs", nprocs, at_least=1, at_most=PROCESSES_MAX)


def _refuse_main_without_file(fn: Any) -> None:
    """Refuse a function that no new process can import."""
    while isinstance(fn, partial):
        fn = fn.func
    main = sys.modules.get("__main__")
    if getattr(fn, "__module__", "") != "__main__" or main is None:
        return
    file = getattr(main, "__file__", None)
    if getattr(main, "__spec__", None) is None and not (file and Path(file).is_file()):
        raise UsageError(
            "fn must be in a file that new processes can import; it is defined in a"
            " main module without one (a prompt, a notebook, `python -c`, or standard"
            " input): put it into a module, such as work.py, and use work."
            f"{getattr(fn, '__qualname__', 'fn')}"
        )


def check_method(name: str, method: Any) -> None:
    """Check the method of starting processes."""
    check_kind(name, method, str, "'spawn' or 'forkserver'")
    if method == "fork":
        raise UsageError(
            f"{name} 'fork' is not supported: a forked process inherits locks held by "
            "threads it does not have, OpenMP pools without their threads, and a "
            "CUDA context it must not use; use 'spawn' or 'forkserver'"
        )
    if method not in _METHODS:
        raise wrong(name, "'spawn' or 'forkserver'", method)


def _refuse_inheriting() -> None:
    # The standard library checks this as well, but its error text is long.
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UsageError(
            "launch() was called while a new process imports this main module, so "
            "every process would start others; put the call under "
            "`if __name__ == '__main__':`"
        )


def _specs(
    nprocs: int,
    *,
    threads: int,
    secret: str,
    is_alone: bool,
    store_port: int | None,
    entry: RunEntry | None,
) -> list[ChildSpec]:
    of_run = {ENTRY_VARIABLE: "" if entry is None else str(entry.path)}
    is_main_thread = threading.current_thread() is threading.main_thread()
    return [
        ChildSpec(
            rank=rank,
            environment=process_environment(
                rank=rank,
                nprocs=nprocs,
                secret=secret,
                store_port=store_port,
                is_alone=is_alone,
            )
            | of_run,
            threads=threads,
            bound_to_thread=is_main_thread,
        )
        for rank in range(nprocs)
    ]


def _start_all(
    method: str,
    specs: list[ChildSpec],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    daemon: bool,
) -> list[Child]:
    children: list[Child] = []
    try:
        for spec in specs:
            children.append(_start(method, spec, fn, args, daemon=daemon))  # noqa: PERF401
    except BaseException:  # processes that run already must not be left behind
        for child in children:
            if child.process is not None:
                child.process.kill()
                child.process.join()
        raise
    return children


def _start(
    method: str,
    spec: ChildSpec,
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    daemon: bool,
) -> Child:
    reader, writer = connection.Pipe(duplex=False)
    try:
        with _as_a_plain_parent(method), _held_interrupts():
            # typeshed gives `Process` to the subclasses of BaseContext only
            process: BaseProcess = multiprocessing.get_context(method).Process(  # type: ignore[attr-defined]
                target=run_child,
                args=(spec, writer, Arguments(fn, args)),
                name=f"rank{spec.rank}",
                daemon=daemon,
            )
            process.start()
    except ChildProcessError as error:
        reader.close()
        raise UsageError(
            "launch() cannot use the fork server of the process that this one was"
            " forked from: launch in that process, or with the method 'spawn'"
        ) from error
    except BaseException:
        reader.close()
        raise
    finally:
        writer.close()  # the child's end is the only one: its death ends our reading
    return Child(spec.rank, process, reader, is_daemon=process.daemon)


@contextmanager
def _held_interrupts() -> Iterator[None]:
    """Start a process in which Ctrl-C waits until `run_child` takes it.

    Else a process that still imports prints a traceback, although the parent alone
    decides what follows.
    """
    resource_tracker.ensure_running()  # to start it later would let them through
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _as_a_plain_parent(method: str) -> Iterator[None]:
    """Start a process as from one of the standard library, whatever made this one.

    - A daemonic process, such as a worker of hypercorn or of a Pool, may not start
      others, as it is ended without a chance to end its own.  Those of `launch` end by
      themselves when the one that started them does.
    - In a process of billiard, Celery's pools, the key is of a class of billiard's,
      which only its own children are sent.
    - In a process of loky, joblib's pools, the start method is one that a new process
      does not know.
    """
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]  # noqa: SLF001  it has no other switch
    with _SWITCH:
        before = dict(config)
        config.pop("daemon", None)
        if "authkey" in config:
            config["authkey"] = AuthenticationString(config["authkey"])
        default = multiprocessing.get_start_method(allow_none=True)
        is_foreign = default not in (None, "fork", *_METHODS)
        if is_foreign:
            multiprocessing.set_start_method(method, force=True)
        try:
            yield
        finally:
            config.update(before)
            if is_foreign:
                multiprocessing.set_start_method(default, force=True)
