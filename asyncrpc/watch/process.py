"""The watch process outlives its worker for half a minute, to report how it ended.

It inherits the worker's pulse, a descriptor of its process, and listening sockets; from
its standard input it reads the key of the queries.  A worker that ends in order kills
it.  It has a session of its own: Ctrl-C and Ctrl-Z do not reach it.  It sleeps until it
is asked, and never holds more than a few connections.

Source: pidfd_open(2).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time

from asyncrpc.watch import pulse, query

CONNECTIONS_MAX = 64  # without a query yet, or not closed by who asked
CONNECTION_S = 2.0  # a client sends its query at once
ANSWERS_PER_S = 200  # of all; more wait in the kernel's queue
REMAINS_S = 30.0  # after the death of the worker: longer than its peers doubt it

_STDIN = 0


def now_s() -> float:
    """Return the time; not by `asyncrpc.clock`, which imports what is not small."""
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class ClientConnection:
    """A connection of a peer that asks about the worker."""

    __slots__ = ("ends_s", "record", "sock")

    def __init__(self, sock: socket.socket, ends_s: float) -> None:
        self.sock = sock
        self.ends_s = ends_s
        self.record = b""


class WatchServer:
    """Answers what is asked about one process, until that has ended for a while.

    Attributes:
        ends_s: when to end; None as long as the worker's process lives.
    """

    def __init__(
        self, memory: int, process: int, listening: list[int], key: bytes
    ) -> None:
        """Watch a process.

        Args:
            memory: descriptor of the worker's pulse.
            process: descriptor of its process.
            listening: descriptors of sockets that listen.
            key: of the queries.
        """
        found = pulse.read(memory)
        assert found is not None  # the worker has written it before we were started
        self._worker = found
        self._memory = memory
        self._process = process
        self._key = key
        self._listening = {one: socket.socket(fileno=one) for one in listening}
        self._asked: dict[int, ClientConnection] = {}
        self._poll = select.poll()
        self._poll.register(process, select.POLLIN)
        self._is_listening = False
        self._allowance = float(ANSWERS_PER_S)
        self._counted_s = now_s()
        self.ends_s: float | None = None

    def run(self) -> None:
        """Answer until it is over."""
        while True:
            now = now_s()
            if self.ends_s is not None and now >= self.ends_s:
                return
            self._drop_late(now)
            self._listen_if_there_is_room(now)
            for descriptor, _ in self._poll.poll(self._wait_ms(now)):
                self._on_event(descriptor, now_s())

    def _on_event(self, descriptor: int, now: float) -> None:
        if descriptor == self._process:
            self._poll.unregister(self._process)
            self.ends_s = now + REMAINS_S
        elif descriptor in self._listening:
            self._accept(self._listening[descriptor], now)
        elif descriptor in self._asked:
            self._on_record(self._asked[descriptor])

    # --- clients ---------------------------------------------------------------------

    def _accept(self, listening: socket.socket, now: float) -> None:
        if len(self._asked) >= CONNECTIONS_MAX or self._allowance < 1:
            return
        try:
            sock, _ = listening.accept()
        except OSError:  # it has gone again
            return
        self._allowance -= 1
        sock.settimeout(0)
        self._asked[sock.fileno()] = ClientConnection(sock, now + CONNECTION_S)
        self._poll.register(sock.fileno(), select.POLLIN)

    def _on_record(self, asked: ClientConnection) -> None:
        """Read what has arrived: answer a query, close on anything else."""
        try:
            more = asked.sock.recv(query.QUERY_BYTES)
        except BlockingIOError:
            return
        except OSError:
            more = b""
        asked.record += more
        missing = query.QUERY_BYTES - len(asked.record)
        if not more or missing < 0 or (missing == 0 and not self._answer(asked)):
            self._end(asked)

    def _answer(self, asked: ClientConnection) -> bool:
        """Answer a query; return whether it was one.

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

    # --- limits ----------------------------------------------------------------------

    def _drop_late(self, now: float) -> None:
        for asked in tuple(self._asked.values()):
            if asked.ends_s <= now:
                self._end(asked)

    def _listen_if_there_is_room(self, now: float) -> None:
        grown = self._allowance + (now - self._counted_s) * ANSWERS_PER_S
        self._allowance, self._counted_s = min(grown, float(ANSWERS_PER_S)), now
        has_room = self._allowance >= 1 and len(self._asked) < CONNECTIONS_MAX
        if has_room is self._is_listening:
            return
        self._is_listening = has_room
        for descriptor in self._listening:
            if has_room:
                self._poll.register(descriptor, select.POLLIN)
            else:
                self._poll.unregister(descriptor)

    def _wait_ms(self, now: float) -> float | None:
        """Return how long nothing is due; None: until something happens."""
        due = [asked.ends_s for asked in self._asked.values()]
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
    """Watch: the arguments are descriptors, of the pulse, the process, and sockets."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    memory, process, *listening = (int(one) for one in arguments)
    WatchServer(memory, process, listening, read_key()).run()
