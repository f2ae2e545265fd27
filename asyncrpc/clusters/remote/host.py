"""A host of a cluster that a host server stands for, as the program sees it.

One connection is a `_ServerLink`.  When it breaks, the processes behind it count as
ended, for the server has ended them; the next start connects anew.
"""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar

import torch

import asyncrpc
from asyncrpc.clusters.hosts import WorkerOutput, WorkerProcess
from asyncrpc.clusters.remote.boot import ServerSettings
from asyncrpc.clusters.remote.frames import (
    ALIVE_S,
    Begun,
    BrokenStreamError,
    Ended,
    Frame,
    HostFrames,
    HostHello,
    Printed,
    Ready,
    SignalWorker,
    StartFailed,
    StartWorker,
    StillHere,
    encode,
)
from asyncrpc.clusters.worker import ProcessOrder, WorkerFailed, WorkerStarted
from asyncrpc.errors import ClusterError

T = TypeVar("T")

_ERRORS_BYTES: Final = 4096  # of the last that a server has said, for errors
_CLOSE_S: Final = 10.0  # for the end of the workers that are left


class ServerStream(Protocol):
    """The standard streams of a host server that runs elsewhere."""

    async def read(self, size: int) -> bytes:
        """Return up to so many bytes of its output; none: the end."""

    async def read_errors(self, size: int) -> bytes:
        """Return up to so many bytes of its errors; none: the end."""

    async def write(self, data: bytes) -> None:
        """Write to its input; OSError: it is gone."""

    def end_input(self) -> None:
        """End its input, upon which it ends."""

    async def wait_ended(self) -> str:
        """Wait until it has ended; return how, as text."""

    def abort(self) -> None:
        """Give it up."""


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """A host, and how to connect to it.

    Attributes:
        connect: starts the command of a host server; ClusterError: it cannot.
    """

    name: str
    connect: Callable[[], Awaitable[ServerStream]]
    settings: ServerSettings
    start_timeout_s: float


class RemoteHost:
    """Starts processes on another host."""

    def __init__(self, place: RemotePlace, output: WorkerOutput) -> None:
        self._place, self._output = place, output
        self._link: _ServerLink | None = None
        self._connecting = asyncio.Lock()

    @property
    def name(self) -> str:
        """The name of the host."""
        return self._place.name

    async def open(self) -> None:
        """Connect; ClusterError: the host cannot be used."""
        await self._connected()

    async def _connected(self) -> _ServerLink:
        async with self._connecting:
            if self._link is None or self._link.is_over:
                if self._link is not None:
                    await self._link.close()
                self._link = _ServerLink(self._place, self._output)
                await self._link.open()
            return self._link

    async def start(self, order: ProcessOrder) -> WorkerProcess:
        """Start a process for a worker; ClusterError: the host cannot be used."""
        link = await self._connected()
        return await link.start(order)

    async def close(self) -> None:
        """End every process that is left."""
        if self._link is not None:
            await self._link.close()


class _ServerLink:
    """A host server, from its start to its end."""

    def __init__(self, place: RemotePlace, output: WorkerOutput) -> None:
        self._place, self._output = place, output
        self._processes: dict[int, WorkerProcess] = {}
        self._pipes: dict[str, tuple[int, int]] = {}  # by name of a worker
        self._last = 0
        self._errors = b""
        self._stream: ServerStream | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self.is_over = False

    # --- its life --------------------------------------------------------------------

    async def open(self) -> None:
        """Start the server; ClusterError: it did not begin."""
        place = self._place
        try:
            async with asyncio.timeout(place.start_timeout_s):
                self._stream = await place.connect()
                self._tasks.append(asyncio.create_task(self._copy_errors()))
                await self._stream.write(place.settings.first_lines)
                frames = HostFrames(self._stream.read)
                await frames.skip_to_marker()
                self._check(await frames.frame())
        except (TimeoutError, BrokenStreamError, OSError) as error:
            how = f"no answer within {place.start_timeout_s:g} s"
            if not isinstance(error, TimeoutError):
                how = await self._how_ended(str(error))
            await self._give_up()
            raise ClusterError(
                f"the host server on {place.name!r} did not begin: {how}"
            ) from error
        except BaseException:
            await self._give_up()
            raise
        self._tasks.append(asyncio.create_task(self._follow(frames)))
        self._set_timer()

    def _check(self, hello: Frame) -> None:
        if not isinstance(hello, HostHello):
            raise BrokenStreamError(f"it began with {type(hello).__name__}")
        ours = str(torch.__version__).partition("+")[0]
        for what, here, there in (
            ("asyncrpc", asyncrpc.__version__, hello.asyncrpc),
            ("torch", ours, hello.torch),
        ):
            if here != there:
                python = self._place.settings.python
                raise ClusterError(
                    f"host {self._place.name!r} has {what} {there}, and the program has"
                    f" {here}: install the same version for {python}"
                )

    async def _how_ended(self, problem: str) -> str:
        """Return how the server ended, with the last that it has said."""
        assert self._stream is not None
        self._stream.end_input()
        try:
            async with asyncio.timeout(_CLOSE_S):
                how = await self._stream.wait_ended()
                await asyncio.wait(self._tasks[:1])  # the errors
        except TimeoutError:
            how = problem
        said = self._errors.decode(errors="replace").strip()
        return f"{how}: {said}" if said else how

    async def close(self) -> None:
        """End the server and its workers, and wait for it."""
        if self._stream is not None and not self.is_over:
            if self._timer is not None:
                self._timer.cancel()
            self._stream.end_input()
            with suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._stream.wait_ended()
                    await asyncio.wait(self._tasks)  # what was printed
        await self._give_up()

    async def _give_up(self) -> None:
        self._on_over("the program has ended it")
        if self._stream is not None:
            self._stream.abort()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        while self._pipes:
            for descriptor in self._pipes.popitem()[1]:
                os.close(descriptor)

    def _on_over(self, why: str) -> None:
        self.is_over = True
        if self._timer is not None:
            self._timer.cancel()
        for process in self._processes.values():
            process.ended.set_result(f"its host {self._place.name!r} was lost: {why}")
        self._processes.clear()

    # --- what the program says -------------------------------------------------------

    async def start(self, order: ProcessOrder) -> WorkerProcess:
        """Start a process for a worker; ClusterError: the host is lost."""
        self._last += 1
        number = self._last
        if order.name not in self._pipes:
            output = self._pipes[order.name] = self._output.pipes(order.name)
            for descriptor in output:
                os.set_blocking(descriptor, False)
        process = WorkerProcess(lambda signum: self._send_signal(number, signum))
        self._processes[number] = process
        try:
            await self._write(StartWorker(number, pickle.dumps(order)))
        except OSError as error:
            self._processes.pop(number, None)
            raise ClusterError(f"host {self._place.name!r} is lost: {error}") from error
        return process

    def _set_timer(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(ALIVE_S, self._tell_that_we_are_here)

    def _tell_that_we_are_here(self) -> None:
        self._set_timer()
        self._send(StillHere())

    def _send_signal(self, number: int, signal_number: int) -> None:
        self._send(SignalWorker(number, signal_number))

    def _send(self, frame: Frame) -> None:
        sending = asyncio.create_task(self._try_write(frame))
        self._tasks.append(sending)
        sending.add_done_callback(self._tasks.remove)

    async def _try_write(self, frame: Frame) -> None:
        with suppress(OSError):  # `_follow` sees it
            await self._write(frame)

    async def _write(self, frame: Frame) -> None:
        assert self._stream is not None
        await self._stream.write(encode(frame))

    # --- what the server says --------------------------------------------------------

    async def _follow(self, frames: HostFrames) -> None:
        why = ""
        try:
            while True:
                await self._take(await frames.frame())
        except (BrokenStreamError, OSError) as error:
            why = str(error) or type(error).__name__
        said = self._errors.decode(errors="replace").strip()
        self._on_over(f"{why}: {said}" if said else why)

    async def _take(self, frame: Frame) -> None:
        match frame:
            case Printed(name, stream, lines):
                await self._show(name, stream, lines)
            case Begun(number, pid):
                _settle(self._process(number).pid, pid)
            case Ready(number, incarnation, addresses):
                report = WorkerStarted(incarnation, tuple(addresses.split()))
                _settle(self._process(number).started, report)
            case StartFailed(number, summary, traceback):
                failure = WorkerFailed(summary, traceback)
                _settle(self._process(number).started, failure)
            case Ended(number, why):
                _settle(self._process(number).ended, why)
                del self._processes[number]
            case _:
                raise BrokenStreamError(f"{type(frame).__name__} has no place here")

    def _process(self, number: int) -> WorkerProcess:
        process = self._processes.get(number)
        if process is None:
            raise BrokenStreamError(f"there is no process {number}")
        return process

    async def _show(self, name: str, stream: str, lines: bytes) -> None:
        """Pass lines on; a program that does not take them stops this host's frames."""
        pipes = self._pipes.get(name)
        if pipes is None or stream not in {"stdout", "stderr"}:
            raise BrokenStreamError(f"there is no output {stream!r} of {name!r}")
        descriptor = pipes[stream == "stderr"]
        while lines:
            try:
                lines = lines[os.write(descriptor, lines) :]
            except BlockingIOError:
                await _writable(descriptor)

    async def _copy_errors(self) -> None:
        """Keep the last that the server says, for errors."""
        assert self._stream is not None
        with suppress(OSError):
            while received := await self._stream.read_errors(_ERRORS_BYTES):
                self._errors = (self._errors + received)[-_ERRORS_BYTES:]


def _settle(future: asyncio.Future[T], value: T) -> None:
    if future.done():
        raise BrokenStreamError("it reports the same twice")
    future.set_result(value)


async def _writable(descriptor: int) -> None:
    loop = asyncio.get_running_loop()
    writable: asyncio.Future[None] = loop.create_future()
    loop.add_writer(descriptor, _set_once, writable)
    try:
        await writable
    finally:
        loop.remove_writer(descriptor)


def _set_once(future: asyncio.Future[None]) -> None:
    if not future.done():  # the loop may say it twice
        future.set_result(None)
