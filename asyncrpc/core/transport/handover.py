"""Listening sockets that two processes share, and connections that change hands.

The sidecar of a worker (`core.sidecar`) has the worker's listening sockets as well.
It accepts from them only while the worker does not, and passes connections that are not
for it on to the worker, by a pair of sockets.  Its copy keeps the port for a while
after the death of the worker; the next process that wants the port asks for it.

Source: unix(7), SCM_RIGHTS and abstract names.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine
from typing import Any, Final

_PER_TURN: Final = 16
_TRIES: Final = 4
_PAUSE_S: Final = 0.05  # the sidecar learns of the worker's death a moment later
_ANSWER_S: Final = 1.0


def port_name(port: int) -> str:
    """Return the abstract name at which a port is given away, without its zero byte.

    Abstract names live in a network namespace, as ports do.
    """
    return f"asyncrpc-port-{port}"


class Handover:
    """The worker's end of the pair by which connections arrive from the sidecar."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        adopt: Callable[[socket.socket], Coroutine[Any, Any, None]],
        start_task: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._loop = loop
        self._adopt = adopt
        self._start_task = start_task
        self._ours, self._theirs = socket.socketpair(
            socket.AF_UNIX, socket.SOCK_SEQPACKET
        )
        self._ours.settimeout(0)
        self._theirs.settimeout(0)
        loop.add_reader(self._ours.fileno(), self._on_readable)

    @property
    def descriptor(self) -> int:
        """The sidecar's end."""
        return self._theirs.fileno()

    def close_sidecar_end(self) -> None:
        """Close the sidecar's end here: the sidecar has it."""
        self._theirs.close()

    def _on_readable(self) -> None:
        for _ in range(_PER_TURN):
            try:
                note, descriptors, _flags, _address = socket.recv_fds(self._ours, 1, 4)
            except BlockingIOError:
                return
            except OSError:
                note, descriptors = b"", []
            for descriptor in descriptors:
                sock = socket.socket(fileno=descriptor)
                sock.settimeout(0)
                self._start_task(self._adopt(sock))
            if not note:  # the sidecar has ended
                self._loop.remove_reader(self._ours.fileno())
                return

    def close(self) -> None:
        """Close the pair; idempotent."""
        if self._ours.fileno() >= 0:
            self._loop.remove_reader(self._ours.fileno())
        self._ours.close()
        self._theirs.close()


async def release_port(port: int) -> bool:
    """Ask the sidecar of a dead worker for its port; return whether it had the port."""
    if not hasattr(socket, "SO_PEERCRED"):  # only Linux has what this needs
        return False
    loop = asyncio.get_running_loop()
    for _ in range(_TRIES):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(0)
            with contextlib.suppress(OSError):
                async with asyncio.timeout(_ANSWER_S):  # its error is an OSError
                    await loop.sock_connect(sock, f"\0{port_name(port)}")
                    return bool(await loop.sock_recv(sock, 1))
        await asyncio.sleep(_PAUSE_S)
    return False
