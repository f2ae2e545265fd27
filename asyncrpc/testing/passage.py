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
from typing import TYPE_CHECKING, Final, TypeAlias

from asyncrpc.testing.scanner import Conversation, Way

if TYPE_CHECKING:
    from asyncrpc.testing.proxy import Proxy
    from asyncrpc.transport.address import Address

Stream: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]
# A piece of the stream and when it is due, in the loop's time; empty at its end, None
# where it broke.
Chunk: TypeAlias = tuple[float, bytes | None]

READ_BYTES: Final = 64 << 10
QUEUE_CHUNKS: Final = 64  # under way in one direction: 4 MiB, as a long line holds
DRAIN_S: Final = 1.0  # how long an end waits for the two workers
_POLL_S: Final = 0.0005
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; close sends RST
_COUNT: Final = struct.Struct("i")


class ProxiedConnection:
    """One connection through a proxy."""

    def __init__(self, proxy: Proxy, near: Stream) -> None:
        self._proxy = proxy
        self._streams = [near]
        self._ended: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._lines = len(Way)  # that have not come to their end
        self._conversation = Conversation(proxy.sessions)
        self._is_cut = False  # nothing passes in the other direction either

    async def run(self) -> None:
        """Connect to the target and pass on what comes, until `end`."""
        try:
            await self._pass_on()
        finally:
            self._proxy.forget(self)
            for _, writer in self._streams:
                writer.transport.abort()

    def end(self, *, reset: bool = True) -> None:
        """Break it; it may have ended before.

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
            self._streams.append(await connected(self._proxy.target))
        except (
            OSError
        ):  # the target does not listen: tell the dialer as well as possible
            self.end()
            return
        (near_in, near_out), (far_in, far_out) = self._streams
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._line(Way.TO_TARGET, near_in, far_out))
            tasks.create_task(self._line(Way.FROM_TARGET, far_in, near_out))

    async def _line(
        self, way: Way, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        """Pass on what goes one way, until it ends or is cut."""
        queue: asyncio.Queue[Chunk] = asyncio.Queue(QUEUE_CHUNKS)
        if writer.is_closing():  # its end came while the other was being dialed
            self.end()
            return
        # So that `drain` waits until the kernel has everything.
        writer.transport.set_write_buffer_limits(high=0)
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(self._read(reader, queue))
            try:
                await self._write(way, queue, writer)
            except OSError:  # who should get it is gone
                self.end()
            reading.cancel()

    async def _read(
        self, reader: asyncio.StreamReader, queue: asyncio.Queue[Chunk]
    ) -> None:
        clock = asyncio.get_running_loop().time
        chunk: bytes | None = b""
        while True:
            try:
                chunk = await reader.read(READ_BYTES)
            except OSError:
                chunk = None  # told to the other end in its turn, not before
            await queue.put((clock() + self._proxy.delay_s, chunk))
            if not chunk:
                return

    async def _write(
        self, way: Way, queue: asyncio.Queue[Chunk], writer: asyncio.StreamWriter
    ) -> None:
        scanner = self._conversation.scanners[way]
        while True:
            due_s, chunk = await queue.get()
            await self._proxy.until_due(due_s)
            if not chunk:
                self._end_line(writer, broken=chunk is None)
                return
            if self._is_cut:
                return
            view = memoryview(chunk)
            allowed, cut = self._proxy.pass_on(self, way, view, scanner.scan(view))
            self._is_cut = cut is not None
            for piece, pause_s in self._proxy.pieces(view[:allowed]):
                if writer.is_closing():
                    raise ConnectionResetError("the receiver is gone")
                writer.write(piece)
                await writer.drain()
                if pause_s:
                    await asyncio.sleep(pause_s)
            if cut is not None:
                if not writer.is_closing():
                    await until_taken(writer)
                self.end(reset=cut.reset)
                cut.happened.set()
                return

    def _end_line(self, writer: asyncio.StreamWriter, *, broken: bool) -> None:
        """Tell one end that the other has ended, in the way in which it did."""
        self._lines -= 1
        if broken:
            self.end()
            return
        with contextlib.suppress(OSError):
            if not writer.is_closing():
                writer.write_eof()
        if not self._lines:
            self.end(reset=False)

    def _reset(self) -> None:
        for _, writer in self._streams:
            sock = writer.get_extra_info("socket")
            # One that is closed has no descriptor: uvloop's socket raises ValueError.
            with contextlib.suppress(OSError, ValueError):
                if sock is not None and sock.family != socket.AF_UNIX:
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    async def _finish(self) -> None:
        """End both streams, and read what still comes: unread, it would be a reset."""
        with contextlib.suppress(TimeoutError, OSError):
            async with asyncio.timeout(DRAIN_S):
                for _, writer in self._streams:
                    if not writer.is_closing():
                        writer.write_eof()
                for reader, _ in self._streams:
                    while await reader.read(READ_BYTES):
                        pass


async def connected(address: Address) -> Stream:
    """Connect to a `tcp://` or `uds://` address.

    Raises:
        OSError: no process listens there.

    Cancellation:
        Nothing is left.
    """
    if address.scheme == "uds":
        return await asyncio.open_unix_connection(address.host)
    return await asyncio.open_connection(address.host, address.port)


async def until_taken(writer: asyncio.StreamWriter) -> None:
    """Wait until the other end's kernel has everything: a reset destroys the rest."""
    sock = writer.get_extra_info("socket")
    clock = asyncio.get_running_loop().time
    until_s = clock() + DRAIN_S
    # Nothing tells when an acknowledgement comes.
    while clock() < until_s and unsent_bytes(sock):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)


def unsent_bytes(sock: socket.socket) -> int:
    """Return how many bytes a socket has that the other end has not acknowledged."""
    if not sys.platform.startswith("linux") or sock.fileno() < 0:  # closed meanwhile
        return 0
    packed = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_COUNT.size))
    return int(_COUNT.unpack(packed)[0])
