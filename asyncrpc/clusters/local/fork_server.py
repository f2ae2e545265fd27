"""A process that has loaded torch and asyncrpc, and becomes a worker by forking.

A new interpreter takes 1.5 s to load torch; eight forks of one that has are workers in
0.4 s.  It has one thread, runs nothing of the program, and holds no lock as it forks.

The program sends a request for each worker through a socket, with three descriptors
(standard output, standard error, reports), and hears of each start and end.  As the
socket ends, so does this process; and the kernel kills its children with it: however
the program ends, none is left.
"""

from __future__ import annotations

import array
import atexit
import gc
import os
import pickle
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from typing import Final, NoReturn

import numpy as np

from asyncrpc.clusters.worker import become_worker, die_with_parent

MESSAGE_BYTES_MAX: Final = 1 << 17  # Linux holds 208 KiB in a socket by default
DESCRIPTORS: Final = 3


@dataclass(frozen=True, slots=True)
class ForkRequest:
    """Fork a worker."""

    number: int
    order: bytes


@dataclass(frozen=True, slots=True)
class Forked:
    """A worker's process has begun."""

    number: int
    pid: int


@dataclass(frozen=True, slots=True)
class ChildEnded:
    """A worker's process has ended; a negative code is the signal that killed it."""

    number: int
    exit_code: int


def main(descriptor: int) -> None:
    """Serve requests until the program's end of the socket closes."""
    _ForkServer(socket.socket(fileno=descriptor)).serve()


class _ForkServer:
    def __init__(self, program: socket.socket) -> None:
        self._program = program
        self._numbers: dict[int, int] = {}  # by pid
        self._woken, self._waker = os.pipe()

    def serve(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        # A collection in a child would copy the pages of all that is loaded.
        gc.collect()
        gc.freeze()
        os.set_blocking(self._waker, False)
        os.set_blocking(self._woken, False)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        poll.register(self._program, select.POLLIN)
        poll.register(self._woken, select.POLLIN)
        while True:
            for descriptor, _ in poll.poll():
                if descriptor == self._woken:
                    os.read(self._woken, 4096)
                    self._reap()
                elif not self._take_request():
                    return

    def _take_request(self) -> bool:
        """Fork as asked; return False at the end of the program."""
        try:
            packed, descriptors = _receive(self._program)
        except OSError:
            return False
        if not packed:
            return False
        request: ForkRequest = pickle.loads(packed)  # noqa: S301  (the program's)
        server = os.getpid()
        pid = os.fork()
        if not pid:
            _be_child(request, descriptors, server)
        for descriptor in descriptors:
            os.close(descriptor)
        self._numbers[pid] = request.number
        self._tell(Forked(request.number, pid))
        return True

    def _reap(self) -> None:
        for pid in list(self._numbers):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                self._tell(ChildEnded(self._numbers.pop(pid), code))

    def _tell(self, message: Forked | ChildEnded) -> None:
        try:
            self._program.send(pickle.dumps(message))
        except OSError:
            sys.exit()  # the program has ended


def _receive(program: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    packed, ancillary, _, _ = program.recvmsg(
        MESSAGE_BYTES_MAX, socket.CMSG_LEN(DESCRIPTORS * descriptors.itemsize)
    )
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            descriptors.frombytes(content)
    return packed, list(descriptors)


def _be_child(request: ForkRequest, descriptors: list[int], server: int) -> NoReturn:
    code = 1
    try:
        code = _run_child(request, descriptors, server)
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001  (as at any end)
        atexit._run_exitfuncs()  # noqa: SLF001
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run_child(request: ForkRequest, descriptors: list[int], server: int) -> int:
    die_with_parent()
    if os.getppid() != server:
        return 1  # it ended before the line above
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    output, errors, reports = descriptors
    os.dup2(output, 1)
    os.dup2(errors, 2)
    os.closerange(3, reports)
    os.closerange(reports + 1, max(descriptors) + 64)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    np.random.seed()  # noqa: NPY002  (else all have the server's numbers)
    return become_worker(request.order, reports)
