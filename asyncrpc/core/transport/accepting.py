"""Accepting: the connections that wait at listening sockets, whoever makes them.

A loop's own server takes as many connections in one turn as its backlog is long, and
when no descriptor is left asyncio says so once for each of them.  Here a turn of the
loop accepts `ACCEPTS_PER_TURN` at most, on every loop.

When no descriptor is left, the owner is asked to close a connection that has proved
nothing.  If there is none, the waiting connections are refused, by a descriptor that is
kept for this: else they would wait until their own limit, and the socket, which stays
readable, would keep the loop busy.  If even that fails, as when the whole host has no
descriptor left, the sockets rest for `REST_S`.

Source: accept(2).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import struct
from collections.abc import Callable, Sequence
from typing import Final

from asyncrpc.core.host.shortage import EXHAUSTED, shortage_of
from asyncrpc.core.logs import LogLimit

logger = logging.getLogger("asyncrpc")

ACCEPTS_PER_TURN: Final = 16
REST_S: Final = 0.1
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; close sends RST


def keep_all() -> bool:
    """Close no connection to make room."""
    return False


class SocketAcceptor:
    """Accepts connections at listening sockets, which it owns."""

    def __init__(
        self,
        sockets: Sequence[socket.socket],
        take: Callable[[socket.socket], None],
        make_room: Callable[[], bool] = keep_all,
        turn_away: Callable[[socket.socket], None] | None = None,
    ) -> None:
        """Begin to accept, on the running loop.

        Args:
            make_room: called when no descriptor is left; closes a connection, and
                returns whether there was one to close.
            turn_away: takes a connection for which there is only the spare descriptor,
                until it closes it and calls `keep_spare`; by default, it is reset.
        """
        self.sockets = list(sockets)
        self._loop = asyncio.get_running_loop()
        self._take = take
        self._make_room = make_room
        self._turn_away = turn_away or _reset
        self._log_limit = LogLimit()
        self._rest: asyncio.TimerHandle | None = None
        self._spare: socket.socket | None = None
        self._start()

    def _start(self) -> None:
        self._rest = None
        self.keep_spare()
        for sock in self.sockets:
            self._loop.add_reader(sock, self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        self.keep_spare()
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._on_failure(listening, error)
                return
            sock.settimeout(0)
            self._take(sock)

    def _on_failure(self, listening: socket.socket, error: OSError) -> None:
        more = self._log_limit.left_out("accept", self._loop.time())
        if more is not None:
            logger.warning(
                "cannot accept a connection at %s%s: %s",
                listening.getsockname(),
                more,
                shortage_of(error) or error,
            )
        is_exhausted = error.errno in EXHAUSTED
        if not (is_exhausted and (self._make_room() or self._refuse(listening))):
            self._pause()

    def _refuse(self, listening: socket.socket) -> bool:
        """Accept and turn away what waits, by the spare descriptor; return if it did.

        A peer then learns at once that it is not served here, and tries again.
        """
        if self._spare is not None:
            self._spare.close()
            self._spare = None
        refused = 0
        with contextlib.suppress(OSError):
            while refused < ACCEPTS_PER_TURN:
                sock, _ = listening.accept()
                refused += 1
                sock.settimeout(0)
                self._turn_away(sock)
        self.keep_spare()
        return refused > 0

    def keep_spare(self) -> None:
        """Take a descriptor to turn connections away with, if one is left."""
        if self._spare is None:
            with contextlib.suppress(OSError):
                self._spare = _unconnected()

    def _pause(self) -> None:
        """Look at the sockets again in a while: they stay readable."""
        if self._rest is None:
            self._stop()
            self._rest = self._loop.call_later(REST_S, self._start)

    def _stop(self) -> None:
        if self._rest is not None:
            self._rest.cancel()
            self._rest = None
        for sock in self.sockets:
            self._loop.remove_reader(sock)

    def close(self) -> None:
        """Stop accepting and close the sockets; idempotent."""
        self._stop()
        for sock in self.sockets:
            sock.close()
        self.sockets.clear()
        if self._spare is not None:
            self._spare.close()
            self._spare = None


def _reset(sock: socket.socket) -> None:
    with sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)


def _unconnected() -> socket.socket:
    """Return a descriptor that only takes its place."""
    return socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
