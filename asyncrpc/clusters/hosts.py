"""Where the workers of a cluster run: the contract of hosts, and of what gives them.

A *ground* gives the hosts of a cluster: this one (`local.processes`), those of `ssh` or
of a Slurm job (`remote`).  A *host* starts processes; all that it has started ends with
it, and a host ends with the program, however the program ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Protocol

from asyncrpc.clusters.worker import ProcessOrder, WorkerFailed, WorkerStarted
from asyncrpc.errors import ClusterError


class WorkerProcess:
    """A process that is, or becomes, a worker.

    Attributes:
        pid: its process id, on its host.
        started: its report, `WorkerStarted` or `WorkerFailed`; it may never come.
        ended: how it ended, as text for the program, such as `"its process exited with
            code 3"`.
    """

    def __init__(self, deliver: Callable[[int], None]) -> None:
        """Begin to wait for its life.

        Args:
            deliver: sends it a signal, once it has begun and before it has ended.
        """
        loop = asyncio.get_running_loop()
        self.pid: asyncio.Future[int] = loop.create_future()
        self.started: asyncio.Future[WorkerStarted | WorkerFailed]
        self.started = loop.create_future()
        self.ended: asyncio.Future[str] = loop.create_future()
        self._deliver = deliver

    async def begun(self) -> None:
        """Wait until it runs, or has ended."""
        waits: set[asyncio.Future[Any]] = {self.pid, self.ended}
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def send(self, signal_number: int) -> None:
        """Send a signal, unless it has ended; it must have begun."""
        if not self.ended.done():
            self._deliver(signal_number)


class WorkerHost(Protocol):
    """A host that starts processes of workers."""

    @property
    def name(self) -> str:
        """Its name, for errors; empty: this host."""

    async def open(self) -> None:
        """Begin; ClusterError: the host cannot be used."""

    async def start(self, order: ProcessOrder) -> WorkerProcess:
        """Start a process for a worker; ClusterError: the host cannot start it."""

    async def close(self) -> None:
        """End every process that is left."""


class WorkerOutput(Protocol):
    """Takes what workers print."""

    def pipes(self, name: str) -> tuple[int, int]:
        """Return where a process of this name writes: its output, and its errors."""

    def close(self) -> None:
        """Write what is left, and end; the processes have ended.  It may block."""


class Ground(Protocol):
    """What gives the hosts of a cluster.

    Attributes:
        start_timeout_s: seconds that a host server may take to start.
        not_kept: why workers cannot outlive the program there; empty: they can.
    """

    start_timeout_s: float
    not_kept: str

    @property
    def is_here(self) -> bool:
        """Whether this host is the only one, so that workers listen on no port."""

    @property
    def waits_for(self) -> str:
        """What takes time until the hosts are open, as text for the progress."""

    async def open(self, output: WorkerOutput) -> Sequence[WorkerHost]:
        """Return the hosts; they have not been opened."""

    async def close(self) -> None:
        """Give the hosts back; they have been closed."""


async def open_hosts(
    ground: Ground, output: WorkerOutput, stack: AsyncExitStack
) -> Sequence[WorkerHost]:
    """Open the hosts of a ground, all at once; `stack` closes them.

    ClusterError names all that cannot be used.
    """
    stack.push_async_callback(ground.close)
    hosts = await ground.open(output)
    for host in hosts:
        stack.push_async_callback(host.close)
    opened = await asyncio.gather(
        *(host.open() for host in hosts), return_exceptions=True
    )
    problems = [problem for problem in opened if problem is not None]
    for problem in problems:
        if not isinstance(problem, ClusterError):
            raise problem
    if problems:
        raise ClusterError("; ".join(map(str, problems)))
    return hosts
