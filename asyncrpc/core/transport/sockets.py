"""Stream sockets on an asyncio loop: what tcp and uds have in common.

One object is both our `Transport` and asyncio's protocol.  Its `get_buffer` and
`buffer_updated` are the handler's own bound methods, so that the loop calls the handler
with nothing in between.

How a connection ends.  `close` writes what is queued, then shuts down its own direction
and reads on, discarding the bytes, until the peer has closed as well.  Closing at once
would be wrong: a socket closed with unread bytes in it sends a reset, and a reset
destroys what the kernel has not yet sent.  A peer that does not follow within
`linger_s` is left.  `abort` resets (RST), so that the peer can tell it from an end.

A peer that has ended may have said why before.  If a write is the first to find out,
the loop gives the socket up without another look; so the bytes in it are read here.

What is copied.  uvloop: nothing; it writes at once if nothing is queued, with writev,
and keeps references to the rest.  asyncio from Python 3.12: nothing (sendmsg).  asyncio
of 3.11: what the kernel does not take at once is copied into a bytearray, and
`writelines` joins all its buffers first; we join small ones only.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import ipaddress
import os
import socket
import struct
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, TypeAlias, cast

from asyncrpc.core.transport.abc import (
    Buffer,
    Listener,
    PeerCredentials,
    StreamHandler,
    Transport,
)
from asyncrpc.core.transport.accepting import SocketAcceptor
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.flow import LINGER_S, WaterMarks
from asyncrpc.errors import ConnectionLostError, TransportError

# Below this one copy is cheaper than one more system call (about 1 us, or 10 KB).
_JOIN_BYTES_MAX: Final = 16 << 10
# A Unix socket's buffer does not grow by itself, as TCP's does.  Against the default of
# 208 KiB this moves 16 MiB at 5.0 GB/s, not 4.1, and does not change a small echo.
_UNIX_SEND_BUFFER_BYTES: Final = 1 << 20
_SCRATCH_BYTES: Final = 64 << 10
_RESET: Final = struct.pack("ii", 1, 0)  # struct linger: on, 0 s; close sends RST
_UCRED: Final = struct.Struct("3i")
_ESTABLISHED: Final = "01"  # in the kernel's table of connections
_IPAddress: TypeAlias = ipaddress.IPv4Address | ipaddress.IPv6Address


class _SocketState(enum.Enum):
    CONNECTING = "connecting"  # connection_made has not run
    OPEN = "open"
    CLOSING = "closing"  # what is queued is being written; what comes is dropped
    ABORTED = "aborted"  # connection_lost is on its way
    CLOSED = "closed"  # connection_lost has run


CONNECTING, OPEN, CLOSING, ABORTED, CLOSED = _SocketState


class SocketTransport(Transport, asyncio.BufferedProtocol):
    """One connected stream socket."""

    def __init__(
        self,
        handler: StreamHandler,
        *,
        scheme: str,
        remote: str = "",
        marks: WaterMarks,
        linger_s: float = LINGER_S,
    ) -> None:
        self._handler = handler
        self._scheme = scheme
        self._remote = remote
        self._marks = marks
        self._linger_s = linger_s
        self._state = CONNECTING
        self._credentials: PeerCredentials | None = None
        self._linger: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._failure: TransportError | None = None
        self._write: Callable[[Sequence[Buffer]], None] = _drop
        self._route(
            get_buffer=handler.get_buffer,
            buffer_updated=handler.buffer_updated,
            pause_writing=handler.pause_writing,
            resume_writing=handler.resume_writing,
        )

    # --- Transport ---

    @property
    def remote(self) -> str:
        """Where the other end is: host and port, or a path."""
        return self._remote

    @property
    def scheme(self) -> str:
        """`tcp` or `uds`."""
        return self._scheme

    @property
    def credentials(self) -> PeerCredentials | None:
        """Return the process at the other end of a Unix socket; None for tcp."""
        return self._credentials

    def send(self, buffers: Sequence[Buffer]) -> None:
        """Queue buffers, in order; see `Transport.send`.

        Costs 1.3 us and a system call under uvloop if nothing is queued.
        """
        self._write(buffers)

    @property
    def queued_bytes(self) -> int:
        """Bytes that the kernel has not taken yet."""
        if self._state in (CONNECTING, CLOSED):
            return 0
        return self._socket.get_write_buffer_size()

    def pause_reading(self) -> None:
        """Stop calling `get_buffer`; idempotent."""
        self._is_paused = True
        if self._state is OPEN and self._socket.is_reading():
            self._socket.pause_reading()

    def resume_reading(self) -> None:
        """Undo `pause_reading`; idempotent."""
        self._is_paused = False
        if self._state is OPEN and not self._socket.is_reading():
            self._socket.resume_reading()

    def use_marks(self, marks: WaterMarks) -> None:
        """Hold back at other marks from now on; see `Transport.use_marks`."""
        if self._state is OPEN:
            self._socket.set_write_buffer_limits(
                high=marks.high_bytes, low=marks.low_bytes
            )

    def set_handler(self, handler: StreamHandler) -> None:
        """Give everything to another handler; see `Transport.set_handler`."""
        self._handler = handler
        if self._state is OPEN:
            self._route(
                get_buffer=handler.get_buffer,
                buffer_updated=handler.buffer_updated,
                pause_writing=handler.pause_writing,
                resume_writing=handler.resume_writing,
            )
            self._socket.set_protocol(self)  # uvloop has cached the handler's methods

    def close(self) -> None:
        """Write what is queued, then end.  Idempotent."""
        if self._state is not OPEN:
            return
        self._begin_closing()
        self._discard_input()
        with contextlib.suppress(OSError):  # ENOTCONN: lost, and about to be told
            self._socket.write_eof()

    def abort(self) -> None:
        """End now and drop what is queued; the peer sees a reset.  Idempotent."""
        if self._state in (OPEN, CLOSING):
            self._reset()
            self._stop(ABORTED)
            self._socket.abort()

    def forsake(self) -> None:
        """End a connection whose making was cancelled.

        uvloop closes it silently; a handler that knows of the connection learns of its
        end here.
        """
        if self._state in (OPEN, CLOSING):
            self._stop(ABORTED)
            self._socket.abort()
            asyncio.get_running_loop().call_soon(self.connection_lost, None)

    # --- asyncio.BufferedProtocol ---

    def _route(self, **methods: Callable[..., object]) -> None:
        """Let the loop call `methods` where it looks for this protocol's own."""
        vars(self).update(methods)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Adopt the loop's transport and tell the handler; the loop calls this."""
        self._socket = cast("asyncio.Transport", transport)
        self._socket.set_write_buffer_limits(
            high=self._marks.high_bytes, low=self._marks.low_bytes
        )
        self._write = _writer_for(self._socket)
        self._state = OPEN
        self._prepare(self._socket.get_extra_info("socket"))
        self._handler.connection_made(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Translate the reason and tell the handler; the loop calls this, once."""
        if self._state is CLOSED:
            return
        if exc is not None and self._state is OPEN:
            self._read_rest()
        aborted = self._state is ABORTED
        self._stop(CLOSED)
        failure = self._failure
        if exc is not None and failure is None and not aborted:
            failure = ConnectionLostError(f"the connection to {self} broke: {exc}")
            failure.__cause__ = exc
        self._handler.connection_lost(failure)

    def eof_received(self) -> None:
        """Close this side, for the peer has closed; the loop calls this.

        Returning None has the loop write what is queued and then close the socket.
        """
        if self._state is OPEN:
            self._begin_closing()

    def __str__(self) -> str:
        return f"{self._scheme}://{self._remote}"

    # --- the end ---

    def _read_rest(self) -> None:
        """Give the handler what the kernel had received before the connection broke.

        Nothing can come any more, so this ends.  The loop closes the socket later.
        """
        self._write = _drop
        fd = self._socket.get_extra_info("socket").fileno()
        with contextlib.suppress(OSError):  # it was reset: there is no more
            while self._state is OPEN and not self._is_paused:
                read_bytes = os.readv(fd, [self.get_buffer(-1)])
                if not read_bytes:
                    return
                self.buffer_updated(read_bytes)

    def _begin_closing(self) -> None:
        self._stop(CLOSING)
        loop = asyncio.get_running_loop()
        self._linger = loop.call_later(self._linger_s, self._give_up)

    def _discard_input(self) -> None:
        scratch = bytearray(_SCRATCH_BYTES)
        self._route(get_buffer=lambda _sizehint: scratch, buffer_updated=_ignore)
        self._socket.set_protocol(self)  # uvloop has cached the handler's methods
        self._socket.resume_reading()

    def _give_up(self) -> None:
        unsent = self._socket.get_write_buffer_size()
        if unsent:
            self._failure = ConnectionLostError(
                f"closed {self} with {unsent} bytes unsent: the peer did not read them "
                f"within {self._linger_s:g} s"
            )
            self._reset()
        self._socket.abort()  # with nothing unsent the kernel delivers the rest

    def _stop(self, state: _SocketState) -> None:
        self._state = state
        self._write = _drop
        if self._linger is not None:
            self._linger.cancel()
            self._linger = None

    def _reset(self) -> None:
        if self._scheme == "tcp":
            with contextlib.suppress(OSError):
                sock = self._socket.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)

    # --- the start ---

    def _prepare(self, sock: socket.socket) -> None:
        # A peer that is gone already makes these fail; connection_lost reports it
        # better.
        with contextlib.suppress(OSError):
            if self._scheme == "tcp":
                _tune_tcp(sock)
                self._remote = _endpoint(sock.getpeername())
            else:
                sock.setsockopt(
                    socket.SOL_SOCKET, socket.SO_SNDBUF, _UNIX_SEND_BUFFER_BYTES
                )
                self._credentials = peer_credentials(sock)


def _drop(buffers: Sequence[Buffer]) -> None:
    """Replace a write once the connection is closing."""


def _ignore(nbytes: int, /) -> None:
    """Replace the handler's `buffer_updated` once this side has closed."""


def _writer_for(transport: asyncio.Transport) -> Callable[[Sequence[Buffer]], None]:
    """Choose how to write many buffers with the fewest copies."""
    is_stdlib = type(transport).__module__.startswith("asyncio.")
    if not is_stdlib or sys.version_info >= (3, 12):
        return cast("Callable[[Sequence[Buffer]], None]", transport.writelines)

    def write(buffers: Sequence[Buffer]) -> None:
        if sum(map(len, buffers)) <= _JOIN_BYTES_MAX:
            transport.write(b"".join(buffers))
            return
        for buffer in buffers:
            transport.write(buffer)

    return write


def _endpoint(name: tuple[str, int]) -> str:
    host, port = name[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _tune_tcp(sock: socket.socket) -> None:
    # A call must not wait for the acknowledgement of the one before it.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    # Finds hosts that vanished without notice, below the pings of the layer above.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def peer_credentials(sock: socket.socket) -> PeerCredentials | None:
    """Return the process at the other end of a Unix socket, if the kernel states it."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:  # only Linux vouches in this way
        return None
    return PeerCredentials(
        *_UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _UCRED.size))
    )


def user_of(peer: tuple[str, int], own: tuple[str, int]) -> int | None:
    """Return the user whose socket is the other end of a TCP connection of this host.

    It reads files of the kernel, of some 150 bytes for each connection: for a thread.

    Source: proc_net_tcp of the kernel's documentation.
    """
    wanted = [(_plain(host), port) for host, port in (peer, own)]
    for name in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{name}").read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        for row in rows[1:]:
            fields = row.split()
            ends = [_end_of(field) for field in fields[1:3]]
            if ends == wanted and fields[3] == _ESTABLISHED:
                return int(fields[7])
    return None


def _end_of(field: str) -> tuple[_IPAddress, int]:
    """Return an address that is written as words of the machine's byte order."""
    digits, _, port = field.partition(":")
    raw = bytes.fromhex(digits)
    if sys.byteorder == "little":
        raw = b"".join(raw[at : at + 4][::-1] for at in range(0, len(raw), 4))
    return _plain(str(ipaddress.ip_address(raw))), int(port, 16)


def _plain(host: str) -> _IPAddress:
    ip_address = ipaddress.ip_address(host.partition("%")[0])
    return getattr(ip_address, "ipv4_mapped", None) or ip_address


class StreamListener(Listener):
    """Listening sockets, and the connections that arrive there."""

    def __init__(
        self,
        addresses: tuple[Address, ...],
        sockets: Sequence[socket.socket],
        make: Callable[[], asyncio.BaseProtocol],
        make_room: Callable[[], bool],
    ) -> None:
        """Begin to accept, on the running loop.

        Args:
            sockets: that listen; they are closed with the listener.
        """
        self._addresses = addresses
        self._make = make
        self._is_closed = False
        self._starting: set[asyncio.Task[None]] = set()
        self._acceptor = SocketAcceptor(sockets, self._take, make_room)

    @property
    def addresses(self) -> tuple[Address, ...]:
        """Every address at which peers can try, best first."""
        return self._addresses

    @property
    def descriptors(self) -> list[tuple[int, int]]:
        """Return the port and the descriptor of each socket, of TCP."""
        sockets = self._acceptor.sockets
        return [(sock.getsockname()[1], sock.fileno()) for sock in sockets]

    def _take(self, sock: socket.socket) -> None:
        task = asyncio.get_running_loop().create_task(self.adopt(sock))
        self._starting.add(task)
        task.add_done_callback(partial(self._on_started, sock))

    def _on_started(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        self._starting.discard(task)
        if task.cancelled():  # it may not have begun
            sock.close()

    async def adopt(self, sock: socket.socket) -> None:
        """Take a connection that was accepted here, by this process or another."""
        if self._is_closed:
            sock.close()
            return
        loop = asyncio.get_running_loop()
        try:
            await loop.connect_accepted_socket(self._make, sock)
        except OSError:  # the peer has gone again
            sock.close()
        except BaseException:
            sock.close()
            raise

    async def close(self) -> None:
        """Stop accepting and free the addresses.  Connections live on.  Idempotent."""
        self._is_closed = True
        self._acceptor.close()
        if self._starting:
            await asyncio.wait(self._starting)  # each needs a few turns of the loop
