"""The code that runs in a started process, around the user's function.

It sets the process up, runs the function, and reports to the parent once how the
function ended.  The process ends when its parent does; and SIGTERM ends it in order, so
that `finally` blocks and `async with` run (a worker says goodbye to its peers) before
the parent kills it.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import inspect
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from multiprocessing import connection
from types import FrameType
from typing import Any, Final, TypeAlias, TypeVar

import torch

from asyncrpc.core.loop.clock import Clock

STARTED: Final = (
    b"started"  # the first message: all steps before the function's call worked
)
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h
_EXIT_BY_SIGTERM: Final = 128 + signal.SIGTERM  # as a shell reports it

_TERMINATED: Final = object()  # SIGTERM ended the coroutine

T = TypeVar("T")
ReportWriter: TypeAlias = "connection.Connection[bytes, bytes]"


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """The specification of a process, given at its start.

    Attributes:
        environment: variables to set, over those that it inherits.
        threads: how many torch may use in it.
        bound_to_thread: the parent's main thread started the process, so the kernel can
            tie its life to that thread; other threads may end long before the parent.
    """

    rank: int
    environment: dict[str, str]
    threads: int
    bound_to_thread: bool


@dataclass(frozen=True, slots=True)
class FunctionReturned:
    """Report: the function returned."""

    value: bytes


@dataclass(frozen=True, slots=True)
class Raised:
    """Report: the function raised.

    Attributes:
        raised_at_s: when, in seconds of the host's monotonic clock.
        traceback: its formatted traceback, with its causes.
        error: the pickled exception, if it survives a round trip; else None.
    """

    raised_at_s: float
    summary: str
    traceback: str
    exit_code: int
    error: bytes | None


Report: TypeAlias = FunctionReturned | Raised


class _Terminated(SystemExit):
    """SIGTERM arrived: the parent ends the process, and expects no report."""


def run_child(
    spec: ChildSpec,
    reports: ReportWriter,
    work: tuple[Callable[..., Any], tuple[Any, ...]],
) -> None:
    """Run `fn(rank, *args)` in this process, and report how it ended."""
    fn, args = work
    # Modules that a fork server has imported are shared with it until they are written
    # to, and a collection of garbage writes to all of them: it would copy 45 MiB.
    gc.freeze()
    _die_with_parent(by_kernel=spec.bound_to_thread)
    signal.signal(signal.SIGTERM, _raise_terminated)
    # A terminal sends Ctrl-C to every process; the parent alone decides what follows.
    # The handler is a function that does nothing, since programs inherit SIG_IGN.
    signal.signal(signal.SIGINT, _do_nothing)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # held until now
    os.environ.update(spec.environment)
    torch.set_num_threads(spec.threads)
    reports.send_bytes(STARTED)
    report = _call(spec.rank, fn, args)
    # From here on the interpreter exits, where an exception from a signal handler would
    # only be noise.
    is_raised = isinstance(report, Raised)
    signal.signal(signal.SIGTERM, signal.SIG_IGN if is_raised else signal.SIG_DFL)
    reports.send_bytes(pickle.dumps(report, protocol=5))
    reports.close()
    if isinstance(report, Raised):
        sys.exit(report.exit_code)


def _call(rank: int, fn: Callable[..., Any], args: tuple[Any, ...]) -> Report:
    try:
        value = fn(rank, *args)
        if inspect.iscoroutine(value):
            # Only a coroutine needs the loop, and uvloop's import.
            from asyncrpc.core.loop import loops  # noqa: PLC0415

            value = loops.run(_until_terminated(value))
    except _Terminated:
        raise
    except SystemExit as exit_:
        return _on_system_exit(exit_)
    except BaseException as error:  # noqa: BLE001  the parent raises it again
        return _raised(error, exit_code=1)
    if value is _TERMINATED:
        raise _Terminated(_EXIT_BY_SIGTERM)
    return _returned(value)


async def _until_terminated(main: Coroutine[Any, Any, T]) -> T | object:
    """Run `main`; SIGTERM cancels it, between two steps of the loop and not within one.

    An exception of a signal handler may be raised inside a callback of the loop, which
    would take it for an error of that callback.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None
    signals: list[int] = []

    def end() -> None:
        signals.append(signal.SIGTERM)
        task.cancel()

    loop.add_signal_handler(signal.SIGTERM, end)
    try:
        return await main
    except asyncio.CancelledError:
        if not signals:
            raise
        return _TERMINATED
    finally:
        loop.remove_signal_handler(signal.SIGTERM)
        signal.signal(signal.SIGTERM, signal.SIG_IGN if signals else _raise_terminated)


def _returned(value: object) -> Report:
    # By value, with plain pickle: torch's own reduction of a tensor to shared memory
    # would need this process to live on.
    try:
        return FunctionReturned(pickle.dumps(value, protocol=5))
    except Exception as error:  # noqa: BLE001  pickle raises whatever `__reduce__` does
        error.add_note(
            f"the result of the function, a {type(value).__qualname__}, cannot be "
            "pickled: return plain values or tensors, or None"
        )
        return _raised(error, exit_code=1)


def _on_system_exit(exit_: SystemExit) -> Report:
    code = exit_.code
    if code is None or code == 0:
        return FunctionReturned(pickle.dumps(None, protocol=5))
    return _raised(exit_, exit_code=code if isinstance(code, int) else 1)


def _raised(error: BaseException, *, exit_code: int) -> Raised:
    return Raised(
        raised_at_s=Clock().now_s(),
        summary=_one_line(error),
        traceback="".join(traceback.format_exception(error)),
        exit_code=exit_code,
        error=_pickled(error),
    )


def _one_line(error: BaseException) -> str:
    """Return type and text, without the notes, which may be a whole traceback."""
    lines = [str(error).partition("\n")[0]] if str(error) else []
    return ": ".join([type(error).__qualname__, *lines])


def _pickled(error: BaseException) -> bytes | None:
    # Many exceptions pickle and then fail to load, because their constructor takes
    # other arguments than those in `args`; so loading is tried here.
    try:
        pickled = pickle.dumps(error, protocol=5)
        pickle.loads(pickled)  # noqa: S301  we made it in the line above
    except Exception:  # noqa: BLE001  whatever their `__reduce__` raises
        return None
    return pickled


def _die_with_parent(*, by_kernel: bool) -> None:
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    if by_kernel and sys.platform == "linux":
        # Works even while some C function holds the GIL.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    # Works everywhere, and covers a parent that was gone before the line above.
    threading.Thread(
        target=_die_when_ready,
        args=(parent.sentinel,),
        name="parent-watch",
        daemon=True,
    ).start()


def _die_when_ready(sentinel: int) -> None:
    connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _raise_terminated(_signum: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # once: a second must not cut cleanup
    raise _Terminated(_EXIT_BY_SIGTERM)


def _do_nothing(_signum: int, _frame: FrameType | None) -> None:
    pass
