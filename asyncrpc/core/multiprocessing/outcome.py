"""How a process ended, and the texts that describe it."""

from __future__ import annotations

import pickle
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeAlias

from asyncrpc.core.multiprocessing.child import (
    STARTED,
    FunctionReturned,
    Raised,
    Report,
)
from asyncrpc.errors import ProcessFailedError

ReportReader: TypeAlias = "connection.Connection[bytes, bytes]"


@dataclass(slots=True)
class Child:
    """A started process, as the parent sees it.

    Attributes:
        process: the process; None once it has ended, and is done with.
        is_daemon: whether it is stopped when the program ends.
        reports: the pipe on which its reports arrive; None after the last.
        has_started: whether it has called the function.
        report: how the function ended; None without a report.
        exit_code: None while it runs.
    """

    rank: int
    process: BaseProcess | None
    reports: ReportReader | None
    is_daemon: bool = False
    has_started: bool = False
    report: Report | None = None
    exit_code: int | None = None


def receive(child: Child) -> None:
    """Read one report, or the end of reports, into `child`."""
    assert child.reports is not None
    try:
        message = child.reports.recv_bytes()
    except (EOFError, OSError):  # the process ended, perhaps in the middle of a report
        child.reports.close()
        child.reports = None
        return
    if message == STARTED:
        child.has_started = True
        return
    report = pickle.loads(message)  # noqa: S301  from our own child
    child.report = report


def result_of(child: Child) -> Any:
    """Return the result of the function of `child`."""
    assert isinstance(child.report, FunctionReturned)
    try:
        return pickle.loads(child.report.value)  # noqa: S301  from our own child
    except Exception as error:
        raise ProcessFailedError(
            f"the result of rank {child.rank} cannot be unpickled here: {error}",
            rank=child.rank,
            exit_code=child.exit_code,
            remote_traceback="",
        ) from error


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks for a message: `rank 3`, or `ranks 0, 2`."""
    listed = ", ".join(map(str, ranks))
    return f"rank {listed}" if len(ranks) == 1 else f"ranks {listed}"


def process_failed(child: Child, nprocs: int) -> ProcessFailedError:
    """Return the error about a failed process, with its cause attached."""
    report = child.report if isinstance(child.report, Raised) else None
    where = f"rank {child.rank} of {nprocs}"
    stopped = "; the others have been stopped" if nprocs > 1 else ""
    if report is None:
        problem = f"{where} {describe_exit(child.exit_code)}{_hint(child)}{stopped}"
    else:
        problem = f"{where} raised {report.summary}{stopped}\n\n{report.traceback}"
    error = ProcessFailedError(
        problem,
        rank=child.rank,
        exit_code=child.exit_code if report is None else report.exit_code,
        remote_traceback="" if report is None else report.traceback,
    )
    error.__cause__ = _load_error(report)
    return error


def describe_exit(exit_code: int | None) -> str:
    """Return the description of an exit status."""
    if exit_code is None or exit_code >= 0:
        return f"exited with code {exit_code}"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    if name == "SIGKILL":
        return "was killed by SIGKILL (by the kernel, if memory ran out: see dmesg)"
    return f"was killed by {name}"


def _hint(child: Child) -> str:
    if child.has_started:
        return " before its function had returned"
    return (
        " while it started: its own output above says why.  The usual reasons: the "
        "call of launch() in the main module is not under "
        "`if __name__ == '__main__':`, or the function's module cannot be imported"
    )


def _load_error(report: Raised | None) -> BaseException | None:
    if report is None or report.error is None:
        return None
    try:
        loaded = pickle.loads(report.error)  # noqa: S301  from our own child
    except Exception:  # noqa: BLE001  it loads there and not here: the text must do
        return None
    return loaded if isinstance(loaded, BaseException) else None
