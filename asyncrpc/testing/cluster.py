"""Groups of workers for tests: all in this process, in a simulation, or in processes.

`Cluster` starts full workers, each with its own directory and threads, on one event
loop.  They are connected by memory, by real sockets, or by a `testing.network.Network`
on a `SimLoop`: then a run is a function of the network's seed, each worker is a host of
its name, and plain functions run on the loop, as a simulation has no threads.

`ProcessCluster` starts each worker but one in its own process; the remaining one is in
the process of the test, which calls the others and may kill them.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, TypeAlias

from asyncrpc import LocalRendezvous, Options
from asyncrpc.api import Worker
from asyncrpc.core import worker as core
from asyncrpc.core.arguments import check_count, check_kind, check_text, wrong
from asyncrpc.core.calls.context import current_worker_var
from asyncrpc.core.loop.loops import loop_for
from asyncrpc.core.loop.threads import Done, Job, ThreadPool
from asyncrpc.core.multiprocessing.launcher import check_method
from asyncrpc.core.parts import Parts
from asyncrpc.core.transport.abc import Connector
from asyncrpc.core.transport.memory import MemoryHub
from asyncrpc.errors import ProcessFailedError, UsageError
from asyncrpc.extend import (
    MEMBERS,
    Incarnation,
    Notice,
    PeerLink,
    WorkerId,
    add_service,
    host_of,
    message,
    takes,
)
from asyncrpc.multiprocessing import Processes, launch
from asyncrpc.testing.network import Network

Wires: TypeAlias = Literal["mem", "uds", "tcp"]

WIRES: Final = ("mem", "uds", "tcp")
LETTERS: Final = "abcdefghijklmnopqrstuvwxyz"
_SECRET: Final = "a secret that every test knows"  # noqa: S105  (it is for tests)


class InlinePool(ThreadPool):
    """Runs functions on the loop, one in each iteration: for loops without threads."""

    runs_here = True

    def __init__(self, name: str, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(name, 1, loop)
        self._waiting: deque[tuple[Job, Done]] = deque()

    def submit(self, job: Job, done: Done) -> None:
        """Run `job` in the next iteration of the loop, then `done`."""
        self._waiting.append((job, done))
        self._loop.call_soon(self._run_one)

    def _run_one(self) -> None:
        if not self._waiting:  # closed meanwhile
            return
        job, done = self._waiting.popleft()
        try:
            result = job()
        except Exception as error:  # noqa: BLE001  (the caller gets it)
            done(None, error)
        else:
            done(result, None)

    async def close(self, timeout_s: float) -> list[str]:
        """Drop jobs that have not begun; no job can be running."""
        self._waiting.clear()
        return []


def sim_worker(name: str, network: Network, **settings: Any) -> Worker:
    """Return a worker whose every choice comes from its network's seed."""
    worker = Worker(name, network=network.connector(name), **settings)
    take_choices_from(network, worker.parts)
    return worker


def take_choices_from(network: Network, parts: Parts) -> None:
    """Let every choice of a worker that has not been started come from a network."""
    identity = parts.identity
    identity.incarnation = Incarnation(network.rng.getrandbits(64) | 1)
    identity.pid, identity.host_id = 0, ""  # nothing that it really runs on
    parts.random_bytes = network.rng.randbytes
    parts.make_pool = lambda: InlinePool(identity.name, parts.loop)


class Cluster:
    """Workers of one group in this process: `async with Cluster(3) as (a, b, c)`.

    Attributes:
        workers: in the order of their names; empty before the start.
        names: `a`, `b`, `c`, ... unless given.

    Example:
        >>> async with Cluster(2, network="uds") as (a, b):
        ...     assert await a.peer("b").call(max, 1, 2) == 2
    """

    def __init__(
        self,
        count: int | None = None,
        *,
        names: Sequence[str] = (),
        network: Wires | Network = "mem",
        options: Options | None = None,
    ) -> None:
        """Describe a group; `async with` starts it.

        Args:
            count: how many workers; left out, as many as there are names.
            names: of the workers, by rank.
            network: `mem`, `uds`, `tcp`, or a simulated network.
            options: of every worker.  With `tcp` and no secret, a secret is added.

        Raises:
            UsageError: neither names nor a count is given, or they disagree; or an
                argument has the wrong type.
        """
        check_names("names", names)
        if count is not None:
            most = len(names) or len(LETTERS)
            check_count("count", count, at_least=1, at_most=most)
        self.names = tuple(names) or tuple(LETTERS[: count or 0])
        if not self.names or count not in (None, len(self.names)):
            raise UsageError(
                f"count must be the number of names, {self.names}, not {count}"
            )
        if not isinstance(network, Network):
            check_word("network", network, WIRES)
        check_options(options)
        self.workers: list[Worker] = []
        self._network = network
        self._options = options or Options()
        self._meeting = LocalRendezvous(len(self.names))
        self._make = self._maker()

    async def __aenter__(self) -> list[Worker]:
        """Start every worker.  None becomes the current one: see `acting_as`.

        Raises:
            AsyncRpcError: as for `Worker.__aenter__`; the started workers are ended.
            UsageError: no event loop runs here.

        Cancellation:
            The started workers are ended.
        """
        loop_for("a Cluster")
        workers = [self._make(name, rank) for rank, name in enumerate(self.names)]
        self.workers = workers
        try:
            async with asyncio.TaskGroup() as starting:
                for worker in workers:
                    starting.create_task(worker.__aenter__())
        except BaseException:
            await self._shut_down(0.0)
            raise
        return workers

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End every worker: with a drain if the block ended well, else at once."""
        await self._shut_down(None if error is None else 0.0)

    async def _shut_down(self, drain_timeout_s: float | None) -> None:
        await asyncio.gather(
            *(
                worker.shutdown(drain_timeout_s=drain_timeout_s)
                for worker in self.workers
            )
        )

    def _maker(self) -> Callable[[str, int], Worker]:
        network, options = self._network, self._options
        if isinstance(network, Network):
            return lambda name, rank: sim_worker(
                name, network, rank=rank, rendezvous=self._meeting, options=options
            )
        connector: Connector | None = None
        if network == "mem":
            connector = MemoryHub().connector()
        elif network == "tcp":
            options = _for_tcp(options)
        return lambda name, rank: Worker(
            name,
            rank=rank,
            rendezvous=self._meeting,
            options=options,
            network=connector,
        )


def _for_tcp(options: Options) -> Options:
    return replace(
        options,
        secret=options.secret or _SECRET,
        network=replace(
            options.network, listen=options.network.listen or ("tcp://127.0.0.1:0",)
        ),
    )


@contextmanager
def acting_as(worker: Worker) -> Iterator[Worker]:
    """Make `worker` the current one of this task, for functions that act on it.

    Raises:
        UsageError: `worker` is not a Worker.
    """
    check_kind("worker", worker, core.Worker, "a Worker")
    token = current_worker_var.set(worker)
    try:
        yield worker
    finally:
        current_worker_var.reset(token)


# --- processes -----------------------------------------------------------------------


class ProcessCluster:
    """A worker here, and others in processes of their own.

    Attributes:
        worker: the worker here, of rank 0.
        names: of the others.

    Example:
        >>> async with ProcessCluster(["b"]) as worker:
        ...     assert await worker.peer("b").call(os.getpid) != os.getpid()
    """

    def __init__(
        self,
        names: Sequence[str],
        *,
        name: str = "a",
        transport: Literal["uds", "tcp"] = "uds",
        options: Options | None = None,
        method: Literal["spawn", "forkserver"] = "spawn",
    ) -> None:
        """Describe a group; `async with` starts it.

        Args:
            names: of the workers in processes.
            name: of the worker here.
            transport: how they reach each other.
            options: of every worker; secret and addresses are filled in.
            method: how the processes start; see `multiprocessing.launch`.

        Raises:
            UsageError: an argument has the wrong type.
        """
        check_names("names", names)
        check_text("name", name)
        check_word("transport", transport, WIRES[1:])
        check_options(options)
        check_method("method", method)
        self.names = tuple(names)
        self._own_name = name
        self._transport = transport
        self._options = options or Options()
        self._method = method
        self._killed: set[str] = set()
        self._processes: dict[str, Processes[None]] = {}
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Worker:
        """Start the processes, and the worker here.

        Raises:
            RendezvousTimeoutError: a process did not start in time.
            UsageError: no event loop runs here.

        Cancellation:
            What was started is ended.
        """
        loop_for("a ProcessCluster")
        async with AsyncExitStack() as stack:
            folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrpc-"))
            )
            options = replace(
                self._options, secret=self._options.secret or secrets.token_hex()
            )
            for rank, name in enumerate(self.names, 1):
                where = self._seat(folder, name, rank, options)
                await stack.enter_async_context(self._process(name, where))
            own = _worker_at(self._seat(folder, self._own_name, 0, options))
            self.worker = await stack.enter_async_context(own)
            stack.push_async_callback(self._stop_others)
            self._stack = stack.pop_all()
        return self.worker

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Tell the processes to end, and wait for them.

        Raises:
            ProcessFailedError: a process failed that this object has not killed.
        """
        await self._stack.__aexit__(kind, error, trace)

    def pid(self, name: str) -> int:
        """Return the process id of a worker.

        Raises:
            UsageError: `name` is not the name of a process.
        """
        self._check_name(name)
        pid = self._processes[name].pids[0]
        assert pid is not None
        return int(pid)

    def expect_death(self, name: str) -> None:
        """Do not count it as a failure if a worker's process dies by itself.

        Raises:
            UsageError: `name` is not the name of a process.
        """
        self._check_name(name)
        self._killed.add(name)

    def kill(self, name: str, signal_number: int = signal.SIGKILL) -> None:
        """Send a signal to a worker's process, which may end it.

        Raises:
            UsageError: `name` is not the name of a process, or the signal is invalid.
        """
        if not _is_signal(signal_number):
            raise wrong("signal_number", "the number of a signal", signal_number)
        self._check_name(name)
        self._killed.add(name)
        os.kill(self.pid(name), signal_number)

    def _check_name(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._processes:
            listed = ", ".join(map(repr, self._processes)) or "none: it is not entered"
            raise wrong("name", f"that of a process ({listed})", name)

    def _seat(self, folder: Path, name: str, rank: int, options: Options) -> _Seat:
        where = "tcp://127.0.0.1:0" if self._transport == "tcp" else f"uds://{folder}"
        if self._transport == "uds":
            where += f"/{name}"
        options = replace(
            options,
            network=replace(options.network, listen=options.network.listen or (where,)),
        )
        return name, rank, len(self.names) + 1, f"file://{folder}/store", options

    @asynccontextmanager
    async def _process(self, name: str, seat: _Seat) -> AsyncIterator[None]:
        """Run a process; at the end, wait for it, or stop it after an error."""
        processes = launch(
            _serve,
            (seat,),
            secret=str(seat[-1].secret),
            method=self._method,
            host_store=False,
            join=False,
        )
        self._processes[name] = processes
        try:
            yield
        except BaseException:
            processes.terminate()
            with contextlib.suppress(ProcessFailedError):
                await processes.wait_async()
            raise
        try:
            await processes.wait_async()
        except ProcessFailedError:
            if name not in self._killed:
                raise

    async def _stop_others(self) -> None:
        """Tell every living process to end."""
        for name in self.names:
            if name in self._killed:
                self._processes[name].terminate(0.1)
                continue
            link = await host_of(self.worker).link_to(name)
            link.tell(_Stop())


def check_names(name: str, names: Any) -> None:
    """Raise UsageError unless an argument is a sequence of different names."""
    is_sequence = isinstance(names, list | tuple)
    if not is_sequence or not all(isinstance(entry, str) and entry for entry in names):
        raise wrong(name, "a list or a tuple of non-empty strings", names)
    if len(set(names)) < len(names):
        raise wrong(name, "different from each other", names)


def check_word(name: str, word: object, words: Sequence[str]) -> None:
    """Raise UsageError unless an argument is one of a few words."""
    if not isinstance(word, str) or word not in words:
        raise wrong(name, " or ".join(map(repr, words)), word)


def check_options(options: object) -> None:
    """Raise UsageError unless an argument is options of workers, or None."""
    check_kind("options", options, (Options, type(None)), "Options, or None")


def _is_signal(number: object) -> bool:
    is_number = isinstance(number, int) and not isinstance(number, bool)
    return is_number and number in signal.valid_signals()


_Seat: TypeAlias = tuple[str, int, int, str, Options]


def _worker_at(seat: _Seat) -> Worker:
    name, rank, world_size, where, options = seat
    return Worker(
        name, rank=rank, world_size=world_size, rendezvous=where, options=options
    )


@message("testing", "stop", about="the receiver", by=MEMBERS)
class _Stop(Notice):
    """The test is over."""


class _Stopping:
    """Ends a worker's process when it is told to; a `runtime.extensions.Service`."""

    name = _Stop.service

    def __init__(self) -> None:
        self.stop_asked = asyncio.Event()
        self.routes = (takes(_Stop, self._on_stop),)

    def _on_stop(self, _link: PeerLink, _notice: _Stop) -> None:
        self.stop_asked.set()

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Do nothing: the process ends with its parent anyway."""

    async def close(self) -> None:
        """Do nothing: the service holds no resources."""


async def _serve(_rank: int, seat: _Seat) -> None:
    """Run a worker until the test is over."""
    worker, stopping = _worker_at(seat), _Stopping()
    add_service(worker, lambda _: stopping)
    async with worker:
        await stopping.stop_asked.wait()
