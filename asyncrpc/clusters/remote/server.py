"""The host server: starts the processes of workers on its host, as told over stdio.

It has the same fork server as a program has on its own host.  The end of its standard
input is the end of the program, and so is a long silence: then all that it has started
ends with it.

Standard output has been taken aside for frames (see `boot`): what a library prints goes
to the standard error, which the program shows.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import select
import signal
import sys
import threading
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

import torch

import asyncrpc
from asyncrpc.clusters.hosts import WorkerProcess
from asyncrpc.clusters.lives import inherited
from asyncrpc.clusters.local.processes import LocalProcesses, OutputRelay
from asyncrpc.clusters.remote.frames import (
    MARKER,
    SILENCE_S,
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
    encode,
)
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import ProcessOrder, WorkerFailed, WorkerStarted
from asyncrpc.errors import ClusterError

_LINES_BYTES: Final = 1 << 16


def torch_version() -> str:
    """Return the version of torch, without what follows a plus sign."""
    return str(torch.__version__).partition("+")[0]


def main(frames: int, silence_s: float = SILENCE_S) -> None:
    """Serve until the standard input ends, or is silent for so long."""
    asyncio.run(_serve(_FrameWriter(frames), silence_s))
    os._exit(0)  # a thread may still wait for the program to take what was printed


class _FrameWriter:
    """Writes frames, from any thread, one after the other; it waits for the program."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._lock = threading.Lock()

    def send(self, frame: Frame) -> None:
        self._write(encode(frame))

    def begin(self) -> None:
        self._write(MARKER + encode(HostHello(asyncrpc.__version__, torch_version())))

    def _write(self, data: bytes) -> None:
        with self._lock, suppress(BrokenPipeError):  # the input has ended as well
            while data:
                # The loop has made it non-blocking if sshd gave one socket for both.
                select.select([], [self._descriptor], [])
                with suppress(BlockingIOError):
                    data = data[os.write(self._descriptor, data) :]

    # The sink of the workers' output.

    def prefix_of(self, name: str, number: int, stream: str) -> bytes:
        """Return nothing: the program puts the names before the lines."""
        return b""

    def write(self, name: str, stream: str, lines: bytes) -> None:
        for at in range(0, len(lines), _LINES_BYTES):
            self.send(Printed(name, stream, lines[at : at + _LINES_BYTES]))


async def _serve(sender: _FrameWriter, silence_s: float) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program alone
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    relay = OutputRelay(sender)
    host = LocalProcesses(relay)
    await host.open()
    try:
        sender.begin()
        await _HostServer(sender, host).take_frames(silence_s)
    finally:
        await host.close()
        await in_thread(relay.close)


class _HostServer:
    def __init__(self, sender: _FrameWriter, host: LocalProcesses) -> None:
        self._sender, self._host = sender, host
        self._processes: dict[int, WorkerProcess] = {}

    async def take_frames(self, silence_s: float) -> None:
        """Do what the program says, until it ends."""
        reader = asyncio.StreamReader()
        loop = asyncio.get_running_loop()
        protocol = asyncio.StreamReaderProtocol(reader)
        await loop.connect_read_pipe(lambda: protocol, sys.stdin)
        frames = HostFrames(reader.read)
        while True:
            try:
                async with asyncio.timeout(silence_s):
                    frame = await frames.frame()
            except (BrokenStreamError, TimeoutError):
                return
            match frame:
                case StartWorker(number, packed):
                    await self._start(number, packed)
                case SignalWorker(number, signal_number):
                    if (process := self._processes.get(number)) is not None:
                        process.send(signal_number)

    async def _start(self, number: int, packed: bytes) -> None:
        order: ProcessOrder = pickle.loads(packed)  # noqa: S301  (our program's)
        order = replace(
            order,
            path=list(sys.path),
            directory=os.getcwd(),  # noqa: PTH109  (a text, as it travels)
            environment=inherited(),
        )
        try:
            process = await self._host.start(order)
        except ClusterError as error:
            self._sender.send(Ended(number, str(error)))
            return
        self._processes[number] = process
        process.pid.add_done_callback(partial(self._on_begun, number))
        process.started.add_done_callback(partial(self._on_started, number))
        process.ended.add_done_callback(partial(self._on_ended, number))

    def _on_begun(self, number: int, pid: asyncio.Future[int]) -> None:
        self._sender.send(Begun(number, pid.result()))

    def _on_started(
        self, number: int, started: asyncio.Future[WorkerStarted | WorkerFailed]
    ) -> None:
        match started.result():
            case WorkerStarted(incarnation, addresses):
                self._sender.send(Ready(number, incarnation, " ".join(addresses)))
            case WorkerFailed(summary, traceback):
                self._sender.send(StartFailed(number, summary, traceback))

    def _on_ended(self, number: int, ended: asyncio.Future[str]) -> None:
        del self._processes[number]
        self._sender.send(Ended(number, ended.result()))
