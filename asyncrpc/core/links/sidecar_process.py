"""Starts and ends the process of a liveness sidecar; see `asyncrpc.core.sidecar`.

It has no port of its own: it listens at the worker's sockets, in the worker's place
when that stands still.  So it may start after a query: queries wait in the kernel's
queue meanwhile.

It is given all that it needs as open descriptors at its start: it has them at whatever
moment the worker stands still or dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncrpc.core.sidecar
from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.sidecar import query
from asyncrpc.core.transport.handover import Handover

logger = logging.getLogger("asyncrpc")

# `asyncrpc` itself imports torch: 200 MiB.  So the process gets an empty package of its
# name, which only leads to the modules in its folder.
PROGRAM: Final = """\
import sys
package = sys.modules["asyncrpc"] = type(sys)("asyncrpc")
package.__path__ = [sys.argv[1]]
from asyncrpc.core.sidecar.process import main
main(sys.argv[2:])
"""
PACKAGE: Final = str(Path(asyncrpc.core.sidecar.__file__).parents[2])

is_supported: Final = hasattr(os, "pidfd_open") and bool(sys.executable)


@dataclass(frozen=True, slots=True)
class SidecarResources:
    """What a sidecar process is given by its worker.

    Attributes:
        memory: descriptor of the worker's heartbeat record.
        listening: the names at which ports are given away, and descriptors of sockets
            that listen there; see `transport.handover`.
        handover: takes the connections that the process accepts in the worker's place.
    """

    memory: int
    listening: tuple[tuple[str, int], ...]
    handover: Handover


class SidecarProcess:
    """The sidecar process of one worker, once it is started.

    Attributes:
        pid: of the process; 0 while it does not run.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        loop: asyncio.AbstractEventLoop,
        secret: bytes | None,
        resources: SidecarResources,
    ) -> None:
        """Describe it.

        Args:
            secret: the cluster's; it answers only peers that have it.
        """
        self._identity = identity
        self._loop = loop
        self._secret = secret
        self._resources = resources
        self._process: subprocess.Popen[bytes] | None = None
        self._exit = -1  # a descriptor that can be read once the process has ended
        self._is_over = False
        self.pid = 0

    def start(self) -> None:
        """Start the process, unless it has been; it takes the loop 1 to 10 ms.

        If that fails, there is a warning, and peers on other hosts have no evidence.
        Without a descriptor for it, the next peer has it tried again.
        """
        if self._process is not None or self._is_over:
            return
        own = -1
        try:
            own = os.pidfd_open(os.getpid())
            self._process = self._spawn(own)
            self.pid = self._process.pid
            self._exit = os.pidfd_open(self.pid)
            self._loop.add_reader(self._exit, self._on_exit)
        except OSError as error:
            self._is_over = self._process is not None or not shortage_of(error)
            self._warn(f"could not be started: {shortage_of(error) or error}")
        finally:
            if own >= 0:
                os.close(own)
            if self._process is not None or self._is_over:
                self._resources.handover.close_sidecar_end()

    def _spawn(self, own: int) -> subprocess.Popen[bytes]:
        resources = self._resources
        descriptors = [resources.memory, own, resources.handover.descriptor]
        names = [part for door in resources.listening for part in door]
        # Not our output: a process that waits for the end of our output would wait for
        # this process as well.  Not our session: a terminal's keys are for us.
        command = [sys.executable, "-I", "-S", "-c", PROGRAM, PACKAGE]
        process = subprocess.Popen(  # noqa: S603  (nothing in it comes from outside)
            [*command, *map(str, descriptors), *map(str, names)],
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            pass_fds=[
                *descriptors,
                *(descriptor for _, descriptor in resources.listening),
            ],
            start_new_session=True,
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError), process.stdin as pipe:
            pipe.write(query.key_from(self._secret, self._identity.incarnation))
        return process

    def _on_exit(self) -> None:
        """Take note that the process has ended by itself, or was killed."""
        self._warn(f"has ended with status {self._take_status()}")

    def _take_status(self) -> int:
        """Wait for the process, which has ended, so that nothing is left of it."""
        assert self._process is not None
        self._loop.remove_reader(self._exit)
        os.close(self._exit)
        self.pid = 0
        return self._process.wait()

    def _warn(self, failure: str) -> None:
        logger.warning(
            "worker %r: the process that tells peers on other hosts whether this one "
            "runs %s; they cannot tell it busy from dead any more",
            self._identity.name,
            failure,
        )

    def close(self) -> None:
        """End the process: it has nothing that would need an end in order."""
        self._is_over = True
        self._resources.handover.close()
        if self.pid:
            # Not by its number: if other code reaps our children, another process may
            # have the number by now.
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._exit, signal.SIGKILL)
            self._take_status()
