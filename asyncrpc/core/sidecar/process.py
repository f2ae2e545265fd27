"""The sidecar process outlives its worker for half a minute, to report its end.

It inherits the worker's pulse, a descriptor of its process, and its listening sockets;
from its standard input it reads the key of the queries.  A worker that ends in order
kills it.  It has a session of its own: Ctrl-C and Ctrl-Z do not reach it.  It sleeps
until a connection arrives, and never holds more than a few connections.

Connections arrive at the worker's own port.  A worker whose loop runs accepts them at
once, and answers queries itself.  This process accepts a connection that has waited for
50 ms: it answers a query, and passes any other connection on to the worker unread, by a
pair of sockets; the worker takes it when it runs again.

The port of a dead worker is given to whichever process of the same user asks for it.

Source: pidfd_open(2), unix(7).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time

from asyncrpc.core.sidecar import pulse, query

CONNECTIONS_MAX = (
    64  # without a query yet, or not closed by the client: the oldest goes
)
CONNECTION_S = 2.0  # a client sends its query at once
ANSWERS_PER_S = 2000  # of all; more wait in the kernel's queue
REMAINS_S = 30.0  # after the death of the worker: longer than its peers doubt it
PATIENCE_S = 0.05  # in which a worker whose loop runs accepts a connection

_STDIN = 0
_CREDENTIALS = struct.Struct("3i")


def now_s() -> float:
    """Return the time; not by `core.loop.clock`, which imports large modules."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class ClientConnection:
    """A connection of a peer that asks about the worker."""

    __slots__ = ("ends_s", "is_query", "record", "sock")

    def __init__(self, sock: socket.socket, ends_s: float) -> None:
        self.sock = sock
        self.ends_s = ends_s
        self.record = b""
        self.is_query = False  # whether it has begun like one


class Door:
    """A listening socket of the worker.

    Attributes:
        name: the abstract name at which its port is given away.
        looks_at_s: when it is polled again.
        has_waited: whether a connection has waited there for `PATIENCE_S`.
    """

    __slots__ = ("has_waited", "is_looked_at", "looks_at_s", "name", "sock")

    def __init__(self, name: str, sock: socket.socket) -> None:
        self.name = name
        self.sock = sock
        self.is_looked_at = False
        self.looks_at_s = 0.0
        self.has_waited = False


class SidecarServer:
    """Answers queries about one process, until that has ended for a while.

    Attributes:
        ends_s: when to end; None as long as the worker's process lives.
    """

    def __init__(
        self,
        memory: int,
        process: int,
        worker: int,
        listening: list[tuple[str, int]],
        key: bytes,
    ) -> None:
        last_pulse = pulse.read(memory)
        assert last_pulse is not None  # the worker wrote it before we were started
        self._worker = last_pulse
        self._memory = memory
        self._process = process
        self._pair = socket.socket(fileno=worker)
        self._key = key
        self._doors = {
            descriptor: Door(name, socket.socket(fileno=descriptor))
            for name, descriptor in listening
        }
        self._asked: dict[int, ClientConnection] = {}
        self._givers: dict[int, socket.socket] = {}
        self._poll = select.poll()
        self._poll.register(process, select.POLLIN)
        self._allowance = float(ANSWERS_PER_S)
        self._counted_s = now_s()
        self.ends_s: float | None = None

    def run(self) -> None:
        """Answer queries until `ends_s`."""
        while self.turn():
            pass

    def turn(self, *, waits: bool = True) -> bool:
        """Do what is due, once something is if it waits; return whether it goes on."""
        now = now_s()
        if self.ends_s is not None and (now >= self.ends_s or not self._doors):
            return False
        self._drop_late(now)
        self._look_at_doors(now)
        for descriptor, _ in self._poll.poll(self._wait_ms(now) if waits else 0):
            self._on_event(descriptor, now_s())
        return True

    def _on_event(self, descriptor: int, now: float) -> None:
        if descriptor == self._process:
            self._poll.unregister(self._process)
            self.ends_s = now + REMAINS_S
            self._offer_ports()
        elif descriptor in self._doors:
            self._on_knock(self._doors[descriptor], now)
        elif descriptor in self._asked:
            self._on_record(self._asked[descriptor])
        elif descriptor in self._givers:
            self._give_port(self._givers[descriptor])

    # --- connections -----------------------------------------------------------------

    def _on_knock(self, door: Door, now: float) -> None:
        """A connection waits: leave it to the worker, if that may still accept it."""
        is_late = door.has_waited and now - door.looks_at_s < CONNECTION_S
        if is_late or self._state() != pulse.TICKING:
            door.has_waited = False
            self._accept(door, now)
        else:
            door.has_waited = True
            door.looks_at_s = now + PATIENCE_S

    def _accept(self, door: Door, now: float) -> None:
        if len(self._asked) >= CONNECTIONS_MAX:
            self._make_room()
        try:
            sock, _ = door.sock.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the worker was faster
            return
        except OSError:  # no descriptor is left
            self._make_room()
            door.looks_at_s = now + PATIENCE_S
            return
        self._allowance -= 1
        sock.settimeout(0)
        self._asked[sock.fileno()] = ClientConnection(sock, now + CONNECTION_S)
        self._poll.register(sock.fileno(), select.POLLIN)

    def _on_record(self, asked: ClientConnection) -> None:
        """Read what has arrived: answer a query; all else is the worker's, unread."""
        try:
            if not asked.is_query:
                ahead = asked.sock.recv(len(query.ASKED), socket.MSG_PEEK)
                if ahead and ahead != query.ASKED:
                    self._pass_on(asked)
                    return
                asked.is_query = bool(ahead)
            more = asked.sock.recv(query.QUERY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        asked.record += more
        missing = query.QUERY_BYTES - len(asked.record)
        if not more or missing < 0 or (missing == 0 and not self._answer(asked)):
            self._end(asked)

    def _pass_on(self, asked: ClientConnection) -> None:
        """Give a connection to the worker; close it if the worker has ended."""
        if self.ends_s is None:
            try:  # noqa: SIM105  (contextlib is not small)
                socket.send_fds(self._pair, [b"1"], [asked.sock.fileno()])
            except OSError:  # the queue to the worker is full, or it has just died
                pass
        self._end(asked)

    def _answer(self, asked: ClientConnection) -> bool:
        """Answer a record if it is a query; return whether it was.

        The client closes the connection, so that no port stays in TIME_WAIT here.
        """
        incarnation = self._worker.incarnation
        nonce = query.read_query(self._key, incarnation, asked.record)
        if nonce is None:
            return False
        answer = query.pack_answer(self._key, incarnation, nonce, self._state())
        try:
            # It fits: nothing else has been sent.
            return asked.sock.send(answer) == len(answer)
        except OSError:
            return False

    def _state(self) -> int:
        if self.ends_s is not None:
            return pulse.GONE
        state = pulse.state_of(self._worker.pid, self._worker.started)
        return pulse.judge(pulse.read(self._memory), state, int(now_s() * 1e9))

    def _end(self, asked: ClientConnection) -> None:
        self._poll.unregister(asked.sock.fileno())
        del self._asked[asked.sock.fileno()]
        asked.sock.close()

    # --- the ports of a dead worker --------------------------------------------------

    def _offer_ports(self) -> None:
        """Offer each port by its name; let go of a port that cannot be offered."""
        for name in {door.name for door in self._doors.values()}:
            giver = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                giver.bind(f"\0{name}")
                giver.listen()
            except OSError:
                giver.close()
                self._let_go(name)
            else:
                giver.settimeout(0)
                self._givers[giver.fileno()] = giver
                self._poll.register(giver.fileno(), select.POLLIN)

    def _give_port(self, giver: socket.socket) -> None:
        """Let go of a port if a process of the same user asks."""
        try:
            asks, _ = giver.accept()
        except OSError:
            return
        with asks:
            size = _CREDENTIALS.size
            credentials = asks.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            _pid, user, _group = _CREDENTIALS.unpack(credentials)
            if user not in (os.getuid(), 0):
                return
            self._let_go(str(giver.getsockname()[1:], "ascii"))
            try:  # noqa: SIM105  (likewise)
                asks.send(b"1")
            except OSError:  # the process has gone again
                pass

    def _let_go(self, name: str) -> None:
        for descriptor, door in tuple(self._doors.items()):
            if door.name == name:
                if door.is_looked_at:
                    self._poll.unregister(descriptor)
                del self._doors[descriptor]
                door.sock.close()

    # --- limits ----------------------------------------------------------------------

    def _drop_late(self, now: float) -> None:
        for asked in tuple(self._asked.values()):
            if asked.ends_s <= now:
                self._drop(asked)

    def _make_room(self) -> None:
        """Let go of the oldest connection: one that belongs here asks at once."""
        oldest = next(iter(self._asked.values()), None)
        if oldest is not None:
            self._drop(oldest)

    def _drop(self, asked: ClientConnection) -> None:
        if asked.is_query:
            self._end(asked)
        else:
            self._pass_on(asked)

    def _look_at_doors(self, now: float) -> None:
        """Poll the doors where a connection may be accepted now."""
        grown = self._allowance + (now - self._counted_s) * ANSWERS_PER_S
        self._allowance, self._counted_s = min(grown, float(ANSWERS_PER_S)), now
        may_accept = self._allowance >= 1
        for descriptor, door in self._doors.items():
            is_wanted = may_accept and door.looks_at_s <= now
            if is_wanted is door.is_looked_at:
                continue
            door.is_looked_at = is_wanted
            if is_wanted:
                self._poll.register(descriptor, select.POLLIN)
            else:
                self._poll.unregister(descriptor)

    def _wait_ms(self, now: float) -> float | None:
        """Return how long nothing is due; None: until something happens."""
        due = [asked.ends_s for asked in self._asked.values()]
        later = [door.looks_at_s for door in self._doors.values()]
        due += [at_s for at_s in later if at_s > now]
        if self.ends_s is not None:
            due.append(self.ends_s)
        if self._allowance < 1:
            due.append(now + 1 / ANSWERS_PER_S)
        return max(0.0, min(due) - now) * 1e3 + 1 if due else None


def read_key() -> bytes:
    """Return the key, which the worker writes at once."""
    key = b""
    while len(key) < query.KEY_BYTES:
        more = os.read(_STDIN, query.KEY_BYTES - len(key))
        if not more:
            raise SystemExit(1)  # the worker died while it started us
        key += more
    return key


def main(arguments: list[str]) -> None:
    """Watch.

    The arguments are descriptors, of the pulse, the process and the pair of sockets,
    and then a name and a descriptor for each listening socket.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    memory, process, pair = (int(argument) for argument in arguments[:3])
    names, descriptors = arguments[3::2], arguments[4::2]
    listening = [
        (name, int(descriptor))
        for name, descriptor in zip(names, descriptors, strict=True)
    ]
    SidecarServer(memory, process, pair, listening, read_key()).run()
