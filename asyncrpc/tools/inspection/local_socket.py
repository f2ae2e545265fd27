"""A local socket through which to look at a worker whose event loop does not run.

A thread of the worker sleeps at a Unix socket in the abstract namespace.  It tells
every process that connects, and that runs as the same user, what the worker does.  It
needs the interpreter but not the loop.  A process that gets no answer learns from the
kernel what has become of the worker's process: see `look_beside`.

Source: unix(7), SO_PEERCRED; proc_pid_stat(5).
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import threading
from collections.abc import Iterable
from importlib import import_module
from itertools import islice
from typing import Any, Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.loop.clock import now_s, process_cpu_s
from asyncrpc.core.parts import Parts
from asyncrpc.core.services.registry import LOADING_LOCK
from asyncrpc.core.transport.sockets import peer_credentials
from asyncrpc.tools.inspection.ages import WaitAges

logger = logging.getLogger("asyncrpc")

is_supported: Final = hasattr(socket, "SO_PEERCRED")
# What answers is loaded before it is needed: 2 s after the start, or after the first
# 2 s in which the process is idle for half of the time, so that it holds up no calls.
LOAD_AFTER_S: Final = 2.0
LOAD_BY_S: Final = 60.0
_IDLE_CPU: Final = 0.5  # of a core
_CLIENT_S: Final = 5.0  # for the asking process to take the answer
ADDRESSES_MAX: Final = 16  # of one worker
_ACCEPT_PAUSE_S: Final = 0.1  # when this process has no descriptor left


def names_of(incarnation: int, addresses: Iterable[str]) -> list[str]:
    """Return the names of a worker's local socket: by incarnation, and by address."""
    by_address = map(_name_by, islice(addresses, ADDRESSES_MAX))
    return [f"asyncrpc-look/{incarnation:016x}", *by_address]


def _name_by(address: str) -> str:
    scheme, _, rest = address.partition("://")
    place = rest.rpartition(":")[2] if scheme == "tcp" else rest
    return f"asyncrpc-look/{scheme}/{place}"


class LocalDoor:
    """The local socket of one worker."""

    def __init__(self, worker: Parts, ages: WaitAges) -> None:
        self._worker = worker
        self._ages = ages
        self._listening: list[socket.socket] = []
        self._is_closed = False

    def open(self, addresses: Iterable[str]) -> None:
        """Listen.  A name that cannot be used is skipped without an error."""
        for name in dict.fromkeys(
            names_of(self._worker.identity.incarnation, addresses)
        ):
            try:
                listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            except OSError as error:  # no descriptor is left
                logger.warning(
                    "cannot listen at %s: %s", name, shortage_of(error) or error
                )
                break
            try:
                listening.bind(f"\0{name}")
                listening.listen()
            except OSError as error:  # another worker, of this process or with the
                listening.close()  # same address in another namespace, has the name
                logger.debug("cannot listen at %s: %s", name, error)
                continue
            self._listening.append(listening)
        if self._listening:
            threading.Thread(
                target=self._answer_all, name="asyncrpc-door", daemon=True
            ).start()

    def close(self) -> None:
        """Stop listening; the thread ends."""
        self._is_closed = True
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes the thread

    def _answer_all(self) -> None:
        """Answer all connections, one after the other, until `close`."""
        doors, poll = self._listening, select.poll()
        for door in doors:
            poll.register(door.fileno(), select.POLLIN)
        by_number = {door.fileno(): door for door in doors}
        wait_ms: float | None = 1e3 * LOAD_AFTER_S
        begun_s = now_s()
        while not self._is_closed:
            cpu_s = process_cpu_s()
            ready = poll.poll(wait_ms)
            is_idle = process_cpu_s() - cpu_s < _IDLE_CPU * LOAD_AFTER_S
            if not ready and (is_idle or now_s() - begun_s >= LOAD_BY_S):
                _load()
                wait_ms = None
            for number, _ in ready:
                if not self._is_closed:
                    try:
                        self._answer(by_number[number])
                    except Exception:
                        logger.exception("could not answer a look at this worker")
        for door in doors:
            door.close()

    def _answer(self, door: socket.socket) -> None:
        try:
            asking, _ = door.accept()
        except OSError:  # this process may have no descriptor left
            threading.Event().wait(_ACCEPT_PAUSE_S)
            return
        with asking, contextlib.suppress(OSError):
            asking.settimeout(_CLIENT_S)
            peer = peer_credentials(asking)
            if peer is not None and peer.uid in (os.getuid(), 0):
                asking.sendall(self._packed_look())

    def _packed_look(self) -> bytes:
        packed: bytes = _load().packed_look(self._worker, self._ages)
        return packed


def _load() -> Any:
    """Return the module that packs looks; the first time, this takes a while."""
    with LOADING_LOCK:
        return import_module("asyncrpc.tools.inspection.beside")
