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
from contextlib import suppress
from functools import partial
from typing import Any, Final

from asyncrpc.clusters.local.fork_server import (
    MESSAGE_BYTES_MAX,
    ChildEnded,
    Forked,
    ForkRequest,
)
from asyncrpc.clusters.worker import ProcessOrder, WorkerFailed, WorkerStarted
from asyncrpc.core.host.lines import LinePrefixer, prefix_of
from asyncrpc.errors import ClusterError

_READ_BYTES: Final = 1 << 16
_LAST_OUTPUT_S: Final = 0.5  # how long a process of a worker's may keep its pipes open
_PROGRAM: Final = (
    "import sys; sys.path[:] = {path!r};"
    " from asyncrpc.clusters.local.fork_server import main; main({descriptor})"
)


class LocalProcess:
    """A process that is, or becomes, a worker.

    Attributes:
        pid: its process id.
        started: its report, `WorkerStarted` or `WorkerFailed`; it may never come.
        ended: its exit code, once it has ended.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.pid: asyncio.Future[int] = loop.create_future()
        self.started: asyncio.Future[WorkerStarted | WorkerFailed]
        self.started = loop.create_future()
        self.ended: asyncio.Future[int] = loop.create_future()

    async def begun(self) -> None:
        """Wait until it runs, or has ended."""
        await asyncio.wait([self.pid, self.ended], return_when="FIRST_COMPLETED")

    def send(self, signal_number: int) -> None:
        """Send a signal, unless it has ended; it must have begun."""
        if not self.ended.done():
            # Its id is not used again: the fork server waits for it.
            with suppress(ProcessLookupError):
                os.kill(self.pid.result(), signal_number)


class LocalProcesses:
    """Starts processes on this host, by a fork server of their own."""

    def __init__(self, relay: OutputRelay) -> None:
        """Start the fork server; call it in a thread."""
        self._relay = relay
        self._processes: dict[int, LocalProcess] = {}
        self._reports: set[int] = set()  # open pipes
        self._last = 0
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

    def open(self) -> None:
        """Hear of starts and ends, on this loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._server, self._hear)

    async def start(self, order: ProcessOrder) -> LocalProcess:
        """Start a process for a worker; ClusterError: the fork server has ended."""
        self._last += 1
        process = self._processes[self._last] = LocalProcess(self._loop)
        request = pickle.dumps(ForkRequest(self._last, pickle.dumps(order)))
        if len(request) > MESSAGE_BYTES_MAX:
            raise ClusterError(
                f"the order of worker {order.name!r} has {len(request)} bytes, more "
                f"than {MESSAGE_BYTES_MAX}: options, environment and sys.path of the "
                "program travel in it; shorten them"
            )
        reports, writer = os.pipe()
        os.set_blocking(reports, False)
        output, errors = self._relay.pipes(order.name)
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
                self._server.sendmsg([request], rights)
            except BlockingIOError:
                await asyncio.sleep(0.01)  # it loads torch, or forks others
            else:
                return

    def _hear(self) -> None:
        try:
            packed = self._server.recv(MESSAGE_BYTES_MAX)
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
                process.ended.set_result(exit_code)

    def _on_server_ended(self) -> None:
        self._loop.remove_reader(self._server)
        for process in self._processes.values():
            process.ended.set_result(-signal.SIGKILL)  # the kernel kills all
        self._processes.clear()

    def _take_report(self, process: LocalProcess, reports: int) -> None:
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


class OutputRelay:
    """Writes what processes print to the program's own streams, line by line.

    A thread does it: a program whose event loop does not run still shows what its
    workers print, and no worker waits for it.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._numbers: dict[str, int] = {}
        self._new: list[tuple[int, LinePrefixer, str]] = []
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
            target = getattr(sys, stream)
            is_coloured = target is not None and bool(target.isatty())
            prefix = prefix_of(name, number, is_coloured=is_coloured)
            self._new.append((reader, LinePrefixer(prefix), stream))
            writers.append(writer)
        self._wake()
        return writers[0], writers[1]

    def close(self) -> None:
        """Write what is left, and end; the processes have ended."""
        self._is_closed = True
        self._wake()
        self._thread.join()

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
        for descriptor in (*readers, self._woken, self._waker):
            os.close(descriptor)

    def _copy(self, reader: int, prefixer: LinePrefixer, stream: str) -> bool:
        received = os.read(reader, _READ_BYTES)
        lines = prefixer.feed(received) if received else prefixer.flush()
        if lines:
            target: Any = getattr(sys, stream)
            # The program has closed it, or has none.
            with suppress(OSError, ValueError, AttributeError):
                target.write(lines.decode(errors="replace"))
                target.flush()
        return bool(received)
