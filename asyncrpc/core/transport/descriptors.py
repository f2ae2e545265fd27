"""Passing open files between the workers of one user on one host.

An event loop's streams drop the descriptors that come with their bytes.  So a worker
that listens at a Unix socket also listens at `PATH.fd`, for descriptors alone.  The
sender connects there, sends one record of `TOKEN_BYTES` random bytes with the
descriptor, and closes; then it names the token over the authenticated connection.

The rules are those of the socket itself: its directory is closed to others, and the
kernel states the user at the other end, who must be ours.  Descriptors that arrive are
bounded in number and in time, and closed if no call claims them.

Source: unix(7), SCM_RIGHTS.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import os
import socket
from pathlib import Path
from typing import Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.transport.accepting import SocketAcceptor
from asyncrpc.core.transport.sockets import peer_credentials
from asyncrpc.core.transport.uds import bind_private, check_length, remove_own
from asyncrpc.errors import ConnectError, TransportError

SUFFIX: Final = ".fd"
TOKEN_BYTES: Final = 16
CONNECTIONS_MAX: Final = 64  # that have not sent their record yet
UNCLAIMED_MAX: Final = 64
RECORD_TIMEOUT_S: Final = 5.0  # the sender sends it at once
CLAIM_TIMEOUT_S: Final = 10.0  # the message that names it is sent right after
_DESCRIPTORS_MAX: Final = 8  # in one record; more than one is refused, all are closed


def send_descriptor(
    path: str, token: bytes, descriptor: int, *, timeout_s: float = RECORD_TIMEOUT_S
) -> None:
    """Pass a descriptor to the worker that listens at `path`; blocks: for a thread."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(timeout_s)
        try:
            sock.connect(path + SUFFIX)
            credentials = peer_credentials(sock)
            if credentials is not None and credentials.uid != os.geteuid():
                raise ConnectError(f"{path}{SUFFIX} belongs to user {credentials.uid}")
            socket.send_fds(sock, [token], [descriptor])
        except OSError as error:
            raise ConnectError(
                f"cannot pass a descriptor to {path}{SUFFIX}: "
                f"{shortage_of(error) or error}"
            ) from error


class DescriptorInbox:
    """Takes the descriptors that peers pass to one worker, and keeps them for it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._listening: list[tuple[SocketAcceptor, Path, int]] = []
        self._connections: dict[socket.socket, asyncio.TimerHandle] = {}
        # None: it could not be received.
        self._unclaimed: dict[bytes, tuple[int | None, asyncio.TimerHandle]] = {}
        self._awaited: dict[bytes, asyncio.Future[int]] = {}

    async def listen(self, path: str) -> None:
        """Listen beside the Unix socket at `path`."""
        beside = Path(path + SUFFIX)
        check_length(beside, TransportError)
        try:
            sock, inode = await bind_private(beside)
        except OSError as error:
            raise TransportError(
                f"cannot listen at {beside}: {shortage_of(error) or error}"
            ) from error
        self._listening.append(
            (SocketAcceptor([sock], self._take, turn_away=self._take), beside, inode)
        )

    async def claim(self, token: bytes) -> int:
        """Return the descriptor that a peer has named; it is the caller's now."""
        kept = self._unclaimed.pop(token, None)
        if kept is not None:
            kept[1].cancel()
            if kept[0] is None:
                raise _none_left()
            return kept[0]
        if token in self._awaited or len(self._awaited) >= UNCLAIMED_MAX:
            raise TransportError("too many descriptors are awaited")
        future: asyncio.Future[int] = self._loop.create_future()
        self._awaited[token] = future
        try:
            async with asyncio.timeout(CLAIM_TIMEOUT_S):
                return await future
        except BaseException:
            if future.done() and not future.cancelled() and not future.exception():
                os.close(future.result())  # it arrived in the very turn that gave it up
            raise
        finally:
            del self._awaited[token]

    def close(self) -> None:
        """Stop listening; close descriptors that were not claimed.  Idempotent."""
        for acceptor, path, inode in self._listening:
            acceptor.close()
            remove_own(path, inode)
        self._listening.clear()
        for sock in tuple(self._connections):
            self._end(sock)
        for token in tuple(self._unclaimed):
            self._give_up(token)

    def _take(self, sock: socket.socket) -> None:
        credentials = peer_credentials(sock)
        is_ours = credentials is None or credentials.uid == os.geteuid()
        if not is_ours or len(self._connections) >= CONNECTIONS_MAX:
            sock.close()
            return
        timer = self._loop.call_later(RECORD_TIMEOUT_S, self._end, sock)
        self._connections[sock] = timer
        self._loop.add_reader(sock, self._read, sock)

    def _read(self, sock: socket.socket) -> None:
        """Take the one record of a connection; anything else is dropped."""
        try:
            token, descriptors, flags = _receive(sock)
        except BlockingIOError:
            return
        except OSError:
            token, descriptors, flags = b"", [], 0
        self._end(sock)
        is_named, is_cut = len(token) == TOKEN_BYTES, flags & socket.MSG_CTRUNC
        if is_named and len(descriptors) == 1 and not is_cut:
            self._keep(token, descriptors[0])
        elif is_named and not descriptors and is_cut:  # there is no room for it
            self._keep(token, None)
        else:
            for descriptor in descriptors:
                os.close(descriptor)

    def _keep(self, token: bytes, descriptor: int | None) -> None:
        awaited = self._awaited.get(token)
        if awaited is not None and not awaited.done():
            if descriptor is None:
                awaited.set_exception(_none_left())
            else:
                awaited.set_result(descriptor)
        elif token in self._unclaimed or len(self._unclaimed) >= UNCLAIMED_MAX:
            _close(descriptor)
        else:
            timer = self._loop.call_later(CLAIM_TIMEOUT_S, self._give_up, token)
            self._unclaimed[token] = (descriptor, timer)

    def _give_up(self, token: bytes) -> None:
        descriptor, timer = self._unclaimed.pop(token)
        timer.cancel()
        _close(descriptor)

    def _end(self, sock: socket.socket) -> None:
        timer = self._connections.pop(sock, None)
        if timer is not None:
            timer.cancel()
            with contextlib.suppress(OSError, ValueError):
                self._loop.remove_reader(sock)
            sock.close()
            for acceptor, _, _ in self._listening:
                acceptor.keep_spare()  # before another part of the worker has it


def _close(descriptor: int | None) -> None:
    if descriptor is not None:
        os.close(descriptor)


def _none_left() -> TransportError:
    why = shortage_of(OSError(errno.EMFILE, ""))
    return TransportError(f"a descriptor could not be received: {why}")


def _receive(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """Return a record, its descriptors, and the flags of recvmsg(2).

    Not `socket.recv_fds`: it ignores the flags, so that programs which this process
    starts would inherit the descriptors.
    """
    descriptors = array.array("i")
    room = socket.CMSG_SPACE(_DESCRIPTORS_MAX * descriptors.itemsize)
    token, ancillary, flags, _ = sock.recvmsg(
        TOKEN_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC
    )
    for level, kind, packed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(
                packed[: len(packed) - len(packed) % descriptors.itemsize]
            )
    return token, list(descriptors), flags
