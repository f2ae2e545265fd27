"""The program's side of the fork server: processes, and what they print."""

from __future__ import annotations

import array
import asyncio
import os
import pickle
import selectors
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Protocol

from asyncrpc.clusters.hosts import WorkerHost, WorkerOutput, WorkerProcess
from asyncrpc.clusters.local.fork_server import (
    MESSAGE_BYTES_MAX,
    ChildEnded,
    Forked,
    ForkRequest,
)
from asyncrpc.clusters.progress import ProgressLine
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import ProcessOrder
from asyncrpc.core.host.lines import LinePrefixer, prefix_of
from asyncrpc.errors import ClusterError

_READ_BYTES: Final = 1 << 16
_LAST_OUTPUT_S: Final = 0.5  # how long a process of a worker's may keep its pipes open
_PROGRAM: Final = (
    "import sys; sys.path[:] = {path!r};"
    " from asyncrpc.clusters.local.fork_server import main; main({descriptor})"
)


class LocalProcesses:
    """Starts processes on this host, by a fork server of their own."""

    name: Final = ""

    def __init__(self, output: WorkerOutput) -> None:
        """Describe the host; `open` starts the fork server."""
        self._output = output
        self._processes: dict[int, WorkerProcess] = {}
        self._reports: set[int] = set()  # open pipes
        self._last = 0
        self._server: socket.socket | None = None

    async def open(self) -> None:
        """Start the fork server; hear of starts and ends, on this loop."""
        self._loop = asyncio.get_running_loop()
        await in_thread(self._start_server)
        self._loop.add_reader(self._socket, self._hear)

    def _start_server(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._server = ours
        with theirs:
            program = _PROGRAM.format(path=sys.path, descriptor=theirs.fileno())
            # Its own session: Ctrl-C at a terminal is for the program alone.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", program],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        ours.setblocking(False)  # noqa: FBT003
        # A forked child of the program must not keep the fork server alive.
        os.register_at_fork(after_in_child=partial(_leave, weakref.ref(ours)))

    async def start(self, order: ProcessOrder) -> WorkerProcess:
        """Start a process for a worker; ClusterError: the fork server has ended."""
        self._last += 1
        process = WorkerProcess(lambda number: _signal(process, number))
        self._processes[self._last] = process
        request = pickle.dumps(ForkRequest(self._last, pickle.dumps(order)))
        if len(request) > MESSAGE_BYTES_MAX:
            raise ClusterError(
                f"the order of worker {order.name!r} has {len(request)} bytes, more "
                f"than {MESSAGE_BYTES_MAX}: options, environment and sys.path of the "
                "program travel in it; shorten them"
            )
        reports, writer = os.pipe()
        os.set_blocking(reports, False)
        output, errors = self._output.pipes(order.name)
        descriptors = array.array("i", [output, errors, writer])
        try:
            await self._send(request, descriptors)
        except OSError as error:
            os.close(reports)
            raise ClusterError(f"the fork server has ended: {error}") from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        self._reports.add(reports)
        self._loop.add_reader(reports, self._take_report, process, reports)
        return process

    async def _send(self, request: bytes, descriptors: Any) -> None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        while True:
            try:
                self._socket.sendmsg([request], rights)
            except BlockingIOError:
                await asyncio.sleep(0.01)  # it loads torch, or forks others
            else:
                return

    def _hear(self) -> None:
        try:
            packed = self._socket.recv(MESSAGE_BYTES_MAX)
        except BlockingIOError:
            return
        except OSError:
            packed = b""
        if not packed:
            self._on_server_ended()
            return
        message: Forked | ChildEnded = pickle.loads(packed)  # noqa: S301  (our own child)
        process = self._processes[message.number]
        match message:
            case Forked(_, pid):
                process.pid.set_result(pid)
            case ChildEnded(number, exit_code):
                del self._processes[number]
                process.ended.set_result(_end_text(exit_code))

    @property
    def _socket(self) -> socket.socket:
        assert self._server is not None, "the host has not been opened"
        return self._server

    def _on_server_ended(self) -> None:
        self._loop.remove_reader(self._socket)
        for process in self._processes.values():
            process.ended.set_result(_end_text(-signal.SIGKILL))  # by the kernel
        self._processes.clear()

    def _take_report(self, process: WorkerProcess, reports: int) -> None:
        packed = os.read(reports, _READ_BYTES)
        if packed and not process.started.done():
            process.started.set_result(pickle.loads(packed))  # noqa: S301  (our own child)
        if not packed:
            self._close_reports(reports)

    def _close_reports(self, reports: int) -> None:
        self._reports.discard(reports)
        self._loop.remove_reader(reports)
        os.close(reports)

    async def close(self) -> None:
        """End the fork server, and with it every process that is left."""
        if self._server is None:
            return
        self._loop.remove_reader(self._server)
        self._server.close()
        for reports in [*self._reports]:
            self._close_reports(reports)
        ended = asyncio.create_task(asyncio.to_thread(self._process.wait))
        await asyncio.shield(ended)


def _leave(server: weakref.ref[socket.socket]) -> None:
    ours = server()
    if ours is not None and ours.fileno() >= 0:
        os.close(ours.detach())  # `close` would wait for the loop to let go of it


def _signal(process: WorkerProcess, signal_number: int) -> None:
    # Its id is not used again: the fork server waits for it.
    with suppress(ProcessLookupError):
        os.kill(process.pid.result(), signal_number)


def _end_text(code: int) -> str:
    if code < 0:
        return f"its process was killed by {signal.Signals(-code).name}"
    return f"its process exited with code {code}"


class LocalGround:
    """This host alone."""

    is_here: Final = True
    waits_for: Final = "starting"
    not_kept: str = ""
    start_timeout_s: float = 60.0  # it has no host server

    async def open(self, output: WorkerOutput) -> Sequence[WorkerHost]:
        """Return this host."""
        return [LocalProcesses(output)]

    async def close(self) -> None:
        """There is nothing to give back."""


class LineSink(Protocol):
    """Takes the lines that processes print; a thread of the relay calls it."""

    def prefix_of(self, name: str, number: int, stream: str) -> bytes:
        """Return what begins each line of a process, the `number`th."""

    def write(self, name: str, stream: str, lines: bytes) -> None:
        """Take whole lines of `"stdout"` or `"stderr"`."""


class ProgramStreams:
    """The standard streams of this process, whose last line may show the progress."""

    def __init__(self, progress: ProgressLine) -> None:
        self._progress = progress

    def prefix_of(self, name: str, number: int, stream: str) -> bytes:
        """Return the name, coloured at a terminal."""
        target = getattr(sys, stream)
        is_coloured = target is not None and bool(target.isatty())
        return prefix_of(name, number, is_coloured=is_coloured)

    def write(self, name: str, stream: str, lines: bytes) -> None:
        """Write lines to the stream."""
        target: Any = getattr(sys, stream)
        self._progress.hide()
        # The program has closed it, or has none.
        with suppress(OSError, ValueError, AttributeError):
            target.write(lines.decode(errors="replace"))
            target.flush()


class OutputRelay:
    """Passes what processes print on to a sink, line by line.

    A thread does it: a program whose event loop does not run still shows what its
    workers print, and no worker waits for it.
    """

    def __init__(self, sink: LineSink) -> None:
        self._sink = sink
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._numbers: dict[str, int] = {}
        self._new: list[tuple[int, LinePrefixer, str, str]] = []
        self._is_closed = False
        self._thread = threading.Thread(
            target=self._run, name="cluster-output", daemon=True
        )
        self._thread.start()

    def pipes(self, name: str) -> tuple[int, int]:
        """Return the ends that a process of this name writes to."""
        number = self._numbers.setdefault(name, len(self._numbers))
        writers = []
        for stream in ("stdout", "stderr"):
            reader, writer = os.pipe()
            prefixer = LinePrefixer(self._sink.prefix_of(name, number, stream))
            self._new.append((reader, prefixer, name, stream))
            writers.append(writer)
        self._wake()
        return writers[0], writers[1]

    def close(self) -> None:
        """Write what is left, and end; the processes have ended."""
        self._is_closed = True
        self._wake()
        self._thread.join()
        os.close(self._woken)  # no sooner: the thread may end before it is woken
        os.close(self._waker)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # enough is written
            os.write(self._waker, b".")

    def _run(self) -> None:
        readers = set[int]()
        while readers or not (self._is_closed and not self._new):
            # A process that a worker has started may outlive it, with its pipe.
            ready = self._selector.select(_LAST_OUTPUT_S if self._is_closed else None)
            if not ready:
                break
            for key, _ in ready:
                if key.fd == self._woken:
                    os.read(self._woken, _READ_BYTES)
                    while self._new:
                        reader, *target = self._new.pop()
                        self._selector.register(reader, selectors.EVENT_READ, target)
                        readers.add(reader)
                elif not self._copy(key.fd, *key.data):
                    self._selector.unregister(key.fd)
                    readers.discard(key.fd)
                    os.close(key.fd)
        self._selector.close()
        for reader in readers:
            os.close(reader)

    def _copy(
        self, reader: int, prefixer: LinePrefixer, name: str, stream: str
    ) -> bool:
        received = os.read(reader, _READ_BYTES)
        lines = prefixer.feed(received) if received else prefixer.flush()
        if lines:
            self._sink.write(name, stream, lines)
        return bool(received)
