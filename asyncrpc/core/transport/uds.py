"""Unix stream sockets: workers of one user on one host.

The file system decides who may connect: the socket lies in a directory that only its
owner can enter.  The kernel tells each end which process the other is (`credentials`),
so that the layer above can check it again.

A socket file outlives a process that was killed.  `listen` replaces a file at which no
process listens any more, and refuses one that is in use; a lock on the directory keeps
two workers from replacing each other's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from asyncrpc.core.host.shortage import shortage_of
from asyncrpc.core.transport.abc import Connector, Listener, StreamHandler, Transport
from asyncrpc.core.transport.accepting import keep_all
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import LINGER_S, WaterMarks
from asyncrpc.core.transport.sockets import SocketTransport, StreamListener
from asyncrpc.errors import ConnectError, RefusedError, TransportError

PATH_BYTES_MAX: Final = 107  # sockaddr_un.sun_path is 108, with a zero at the end
BACKLOG: Final = 1024
LOCK_WAIT_S: Final = 10.0  # a process that was stopped may hold it for ever
_LOCK_POLL_S: Final = 0.002
_OTHERS: Final = 0o077  # any right of the group or of the world


@dataclass(frozen=True)
class UdsConnector(Connector):
    """Connects and listens by Unix stream sockets.

    Attributes:
        linger_s: seconds that `close` waits for the peer to read what is queued.
        marks: when `send` makes the handler hold back.
        make_room: closes a connection when no descriptor is left; see `SocketAcceptor`.
    """

    scheme = "uds"
    linger_s: float = LINGER_S
    marks: WaterMarks = field(default_factory=WaterMarks)
    make_room: Callable[[], bool] = field(default=keep_all, compare=False)

    async def listen(
        self, address: Address, accept: Callable[[], StreamHandler]
    ) -> Listener:
        """Listen at the path of `address`; make its directory if it is missing."""
        path = Path(address.host)
        check_length(path, TransportError)
        try:
            sock, inode = await bind_private(path)
        except OSError as error:
            raise _cannot_listen(address, error) from error
        try:
            return UdsListener(
                address,
                sock,
                inode,
                lambda: self._protocol(accept(), str(path)),
                self.make_room,
            )
        except OSError as error:
            sock.close()
            remove_own(path, inode)
            raise _cannot_listen(address, error) from error

    async def connect(self, address: Address, handler: StreamHandler) -> Transport:
        """Connect to the path of `address`; see `Connector.connect`."""
        check_length(Path(address.host), ConnectError)
        protocol = self._protocol(handler, address.host)
        loop = asyncio.get_running_loop()
        try:
            await loop.create_unix_connection(lambda: protocol, address.host)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise RefusedError(f"cannot connect to {address}: {error}") from error
        except OSError as error:
            why = shortage_of(error) or error
            raise ConnectError(f"cannot connect to {address}: {why}") from error
        except asyncio.CancelledError:
            protocol.forsake()  # it may have been made in this very turn of the loop
            raise
        return protocol

    def _protocol(self, handler: StreamHandler, path: str) -> SocketTransport:
        return SocketTransport(
            handler,
            scheme="uds",
            remote=path,
            marks=self.marks,
            linger_s=self.linger_s,
        )


class UdsListener(StreamListener):
    """A listening Unix socket and its file."""

    def __init__(
        self,
        address: Address,
        sock: socket.socket,
        inode: int,
        make: Callable[[], SocketTransport],
        make_room: Callable[[], bool],
    ) -> None:
        super().__init__((address,), [sock], make, make_room)
        self._inode = inode

    async def close(self) -> None:
        """Stop accepting and remove the file; see `StreamListener.close`."""
        remove_own(Path(self.addresses[0].host), self._inode)
        await super().close()


def _cannot_listen(address: Address, error: OSError) -> TransportError:
    return TransportError(f"cannot listen at {address}: {shortage_of(error) or error}")


def check_length(path: Path, error: type[TransportError]) -> None:
    """Raise `error` if a path is longer than that of a Unix socket may be."""
    length = len(os.fsencode(path))
    if length > PATH_BYTES_MAX:
        raise error(
            f"{str(path)!r} has {length} bytes, but the path of a Unix socket can have "
            f"{PATH_BYTES_MAX}; use a shorter directory"
        )


async def bind_private(path: Path) -> tuple[socket.socket, int]:
    """Return a listening socket and the inode of its file."""
    directory = _open_private(path.parent)
    try:
        await _lock(directory, path.parent)
        _remove_stale(path)
        return _bind(path)
    finally:
        os.close(directory)


def _bind(path: Path) -> tuple[socket.socket, int]:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(0)
        sock.bind(str(path))
        path.chmod(0o600)  # no race: only we can enter the directory
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock, path.stat().st_ino


def remove_own(path: Path, inode: int) -> None:
    """Remove the file if it is still the one with `inode`."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_ino == inode:  # else another worker has replaced it
            path.unlink()


def _open_private(directory: Path) -> int:
    """Return a descriptor of a directory that is ours alone; make it if needed."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    status = os.fstat(descriptor)
    if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
        os.close(descriptor)
        raise TransportError(
            f"{directory} must be owned by user {os.geteuid()} and closed to "
            f"others, but user {status.st_uid} owns it with mode "
            f"{stat.S_IMODE(status.st_mode):o}; chmod 700 it, or use another"
        )
    return descriptor


async def _lock(descriptor: int, directory: Path) -> None:
    """Lock a directory; others hold its lock for a few system calls."""
    try:
        async with asyncio.timeout(LOCK_WAIT_S):
            while not _try_lock(descriptor):  # noqa: ASYNC110  (no event tells of it)
                await asyncio.sleep(_LOCK_POLL_S)
    except TimeoutError as error:
        raise TransportError(
            f"another process has locked {directory} for {LOCK_WAIT_S:g} s: continue "
            "or end it if it was stopped, or use another directory"
        ) from error


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_stale(path: Path) -> None:
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "a file that is not a socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(0)  # EAGAIN is an answer too: the backlog is full
        if probe.connect_ex(str(path)) != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, "another worker listens there")
    path.unlink()
