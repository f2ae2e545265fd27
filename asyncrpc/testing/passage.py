"""One connection through a proxy: two sockets, and the bytes in each direction.

`testing.proxy` decides what happens to it; this module does it.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
import struct
import sys
import termios
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from asyncrpc.testing.proxied_socket import ProxiedSocket
from asyncrpc.testing.scanner import Conversation, Way

if TYPE_CHECKING:
    from asyncrpc.core.transport.address import Address
    from asyncrpc.testing.proxy import Proxy

# When a piece of the stream is due, in the loop's time, and the piece; empty at the end
# of the stream, None if it broke.
Chunk: TypeAlias = tuple[float, bytes | None]

QUEUE_CHUNKS: Final = 64  # under way in one direction: 4 MiB, as on a long line
DRAIN_S: Final = 1.0  # how long an end waits for the two workers
_POLL_S: Final = 0.0005
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; close sends RST
_COUNT: Final = struct.Struct("i")


class ProxiedConnection:
    """One connection through a proxy."""

    def __init__(self, proxy: Proxy, near: ProxiedSocket) -> None:
        self._proxy = proxy
        self._sockets = [near]
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._lines = len(Way)  # that have not come to their end
        self._conversation = Conversation(proxy.sessions)
        self._is_cut = False  # nothing passes in the other direction either

    async def run(self) -> None:
        """Connect to the target and pass on all bytes, until `end`."""
        try:
            await self._pass_on()
        finally:
            self._proxy.forget(self)
            for stream in self._sockets:
                stream.abort()

    def end(self, *, reset: bool = True) -> None:
        """Break the connection, which may have ended before.

        Args:
            reset: both ends see a reset, on TCP; else the stream ends.
        """
        if not self._ended.done():
            self._ended.set_result(reset)

    async def _pass_on(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            work = tasks.create_task(self._connect_and_pass_on())
            reset = await self._ended
            work.cancel()
        if reset:
            self._reset()
        else:
            await self._finish()

    async def _connect_and_pass_on(self) -> None:
        try:
            await self._proxy.until_due(0.0)
            self._sockets.append(await connected(self._proxy.target))
        except OSError:  # no process listens there: tell the dialer if possible
            self.end()
            return
        near, far = self._sockets
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._line(Way.TO_TARGET, near, far))
            tasks.create_task(self._line(Way.FROM_TARGET, far, near))

    async def _line(
        self, way: Way, source: ProxiedSocket, target: ProxiedSocket
    ) -> None:
        """Pass on one direction, until it ends or is cut."""
        queue: asyncio.Queue[Chunk] = asyncio.Queue(QUEUE_CHUNKS)
        if target.is_closing:  # it ended while the other socket was being dialed
            self.end()
            return
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(source, queue))
            try:
                await self._write(way, queue, target)
            except OSError:  # the receiver is gone
                self.end()
            reading.cancel()

    async def _read(self, source: ProxiedSocket, queue: asyncio.Queue[Chunk]) -> None:
        clock = asyncio.get_running_loop().time
        chunk: bytes | None = b""
        while True:
            try:
                chunk = await source.read()
            except OSError:
                chunk = None  # told to the other end in its turn, not before
            await queue.put((clock() + self._proxy.delay_s, chunk))
            if not chunk:
                return

    async def _write(
        self, way: Way, queue: asyncio.Queue[Chunk], target: ProxiedSocket
    ) -> None:
        scanner = self._conversation.scanners[way]
        while True:
            due_s, chunk = await queue.get()
            await self._proxy.until_due(due_s)
            if not chunk:
                self._end_line(target, broken=chunk is None)
                return
            if self._is_cut:
                return
            view = memoryview(chunk)
            allowed, cut = self._proxy.pass_on(self, way, view, scanner.scan(view))
            self._is_cut = cut is not None
            for piece, pause_s in self._proxy.pieces(view[:allowed]):
                if target.is_closing:
                    raise ConnectionResetError("the receiver is gone")
                target.write(piece)
                await target.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
            if cut is not None:
                if not target.is_closing:
                    await until_taken(target)
                self.end(reset=cut.reset)
                cut.happened.set()
                return

    def _end_line(self, target: ProxiedSocket, *, broken: bool) -> None:
        """Tell one end that the other has ended, in the same way."""
        self._lines -= 1
        if broken:
            self.end()
            return
        with contextlib.suppress(OSError):
            if not target.is_closing:
                target.write_eof()
        if not self._lines:
            self.end(reset=False)

    def _reset(self) -> None:
        for stream in self._sockets:
            sock = _socket_of(stream)
            # A closed socket has no descriptor: that of uvloop raises ValueError.
            with contextlib.suppress(OSError, ValueError):
                if sock is not None and sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    async def _finish(self) -> None:
        """End both streams, and read the rest: unread bytes would cause a reset."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(DRAIN_S):
                for stream in self._sockets:
                    if not stream.is_closing:
                        stream.write_eof()
                for stream in self._sockets:
                    while await stream.read():
                        pass


async def connected(address: Address) -> ProxiedSocket:
    """Connect to a `tcp://` or `uds://` address."""
    loop = asyncio.get_running_loop()
    if address.scheme == "uds":
        pair = await loop.create_unix_connection(ProxiedSocket, address.host)
    else:
        pair = await loop.create_connection(ProxiedSocket, address.host, address.port)
    return pair[1]


async def until_taken(target: ProxiedSocket) -> None:
    """Wait until the other end's kernel has everything: a reset destroys the rest."""
    sock = _socket_of(target)
    clock = asyncio.get_running_loop().time
    until_s = clock() + DRAIN_S
    # There is no event for an acknowledgement.
    while clock() < until_s and unsent_bytes(sock):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def _socket_of(stream: ProxiedSocket) -> socket.socket:
    return cast(socket.socket, stream.get_extra_info("socket"))


def unsent_bytes(sock: socket.socket) -> int:
    """Return how many bytes a socket has that the other end has not acknowledged."""
    if not sys.platform.startswith("linux") or sock.fileno() < 0:  # closed meanwhile
        return 0
    packed = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
    return int(_COUNT.unpack(packed)[0])
