"""The code of a started worker: it joins the program's worker, and serves until told.

It reports twice at most, in its pipe: that it can be called, or why it cannot.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing import process
from typing import Final

import torch

from asyncrpc import JoinRendezvous, Options
from asyncrpc.api import Worker
from asyncrpc.clusters.code.service import CodeService
from asyncrpc.clusters.kept import log_of
from asyncrpc.clusters.service import ClusterService
from asyncrpc.core.host.socket_directory import SocketDirectory
from asyncrpc.core.loop.loops import run
from asyncrpc.core.multiprocessing.environment import threads_each
from asyncrpc.extend import add_service

REPORT_BYTES_MAX: Final = 1 << 16  # what a pipe holds: the report never waits
_PR_SET_PDEATHSIG: Final = 1  # linux/prctl.h


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOrder:
    """What a process needs to become a worker.

    Attributes:
        contact: addresses of the program's worker, which admits it.
        options: of the worker, without a secret.
        threads: how many torch may use in it; None: an equal share of the cores.
        sharers: how many workers of the cluster share its host.
        drain_timeout_s: seconds that calls in flight have when it is stopped.
        path: of modules, as the program has it.
        directory: the program's working directory.
        arguments: the program's command line.
        environment: the program's, which has changed since the fork server began.
        keeps: name of a cluster whose workers may outlive their program; None: they
            do not.
        has_own_socket: whether it listens on a Unix socket of its own alone: that of
            others lies in a directory that goes with the program.
        secret: of the cluster; not shown in any text.
    """

    name: str
    contact: tuple[str, ...]
    options: Options
    threads: int | None
    sharers: int
    drain_timeout_s: float
    path: Sequence[str]
    directory: str
    arguments: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)
    secret: bytes = field(repr=False)
    keeps: str | None = None
    has_own_socket: bool = False


@dataclass(frozen=True, slots=True)
class WorkerStarted:
    """Report: the worker can be called, at these addresses."""

    incarnation: int
    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WorkerFailed:
    """Report: the worker could not start, or a step of it raised.

    Attributes:
        summary: one line.
        traceback: as Python prints it.
    """

    summary: str
    traceback: str


def die_with_parent(*, dies: bool = True) -> None:
    """Let the kernel kill this process, or not, as the one that forked it ends."""
    signal_number = signal.SIGKILL if dies else 0
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0)


def become_worker(packed_order: bytes, reports: int) -> int:
    """Run a worker in this process until it is stopped; return the exit code."""
    try:
        order: ProcessOrder = pickle.loads(packed_order)  # noqa: S301  (the program's)
        _prepare(order)
        run(_serve(order, reports))
    except BaseException as error:  # noqa: BLE001  (the program hears of it)
        _report(reports, _failure_of(error))
        return 1
    return 0


def _prepare(order: ProcessOrder) -> None:
    """Make this process like the program: its modules, directory and environment."""
    os.environ.clear()
    os.environ.update(order.environment)
    os.chdir(order.directory)
    sys.path[:] = order.path
    sys.argv[:] = order.arguments
    torch.set_num_threads(threads_each(order.sharers, order.threads, "threads"))
    process.current_process().name = order.name


async def _serve(order: ProcessOrder, reports: int) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    with _listening(order) as options:
        worker = Worker(
            order.name,
            rendezvous=JoinRendezvous(order.contact),
            options=replace(options, secret=order.secret),
        )
        stay = None if order.keeps is None else partial(_stay, order.keeps, order.name)
        add_service(worker, lambda host: ClusterService(host, stopped.set, stay))
        add_service(worker, CodeService)
        async with worker:
            _report(reports, WorkerStarted(worker.incarnation, worker.addresses))
            await stopped.wait()
            await worker.shutdown(drain_timeout_s=order.drain_timeout_s)


@contextmanager
def _listening(order: ProcessOrder) -> Iterator[Options]:
    """Return the options of the worker, with its own socket if it is to have one."""
    network = order.options.network
    if not order.has_own_socket:
        yield order.options
        return
    directory = SocketDirectory()
    try:
        listen = (f"uds://{directory.path / 'worker'}",)
        yield replace(order.options, network=replace(network, listen=listen))
    finally:
        directory.remove()


def _stay(cluster: str, name: str) -> None:
    """Outlive the program: let no signal come at its end, and print to a file."""
    log = log_of(cluster, name)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(log, stream.fileno())
    os.close(log)
    die_with_parent(dies=False)


def _report(reports: int, report: WorkerStarted | WorkerFailed) -> None:
    os.write(reports, pickle.dumps(report))


def _failure_of(error: BaseException) -> WorkerFailed:
    summary = f"{type(error).__qualname__}: {error}".partition("\n")[0]
    text = "".join(traceback.format_exception(error))
    return WorkerFailed(summary[:1000], text[-REPORT_BYTES_MAX // 4 :])
