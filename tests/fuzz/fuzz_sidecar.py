"""The sidecar: whoever connects, however, who asks as a peer does is answered.

Choices connect to a server in this process, send queries, sound, forged and in pieces,
what is for the worker, and garbage, close, let time go by, and let the worker's process
end.  The server never fails, holds few connections, and answers queries of its key
alone.  Who asks afterwards is answered.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator
from typing import Final

import pytest

from asyncrpc.core.sidecar import process, pulse, query
from asyncrpc.core.sidecar.process import SidecarServer
from tests.fuzz.choices import Choices

SECRET: Final = b"a secret of the honest ones"
INCARNATION: Final = 77
CONNECTIONS_MAX: Final = 4
STEPS_MAX: Final = 64
CLIENTS_MAX: Final = 12
QUERY_WAITS_S: Final = 1.0
STATES: Final = frozenset({pulse.TICKING, pulse.BUSY, pulse.STOPPED, pulse.GONE})


class Client:
    """A connection, and what it has sent and got."""

    def __init__(self, port: int) -> None:
        self.sock = socket.create_connection(("127.0.0.1", port))
        self.sock.settimeout(0)
        self.sent = b""
        self.got = b""

    def send(self, data: bytes) -> None:
        with contextlib.suppress(OSError):
            self.sent += data[: self.sock.send(data)]

    def receive(self) -> None:
        with contextlib.suppress(OSError):
            while some := self.sock.recv(4096):
                self.got += some


class World:
    """A sidecar, driven step by step at a time of its own, and its clients."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        patch.setattr(process, "now_s", lambda: self.now_s)
        patch.setattr(process, "CONNECTIONS_MAX", CONNECTIONS_MAX)
        self.key = query.key_from(SECRET, INCARNATION)
        self._stack = contextlib.ExitStack()
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.settimeout(0)
        self.port = self._listening.getsockname()[1]
        self.worker, pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (self.worker, pair):
            end.settimeout(0)
        memory = os.memfd_create(pulse.NAME)
        started = pulse.started_at(os.getpid())
        os.write(
            memory,
            pulse.Pulse(
                os.getpid(), started, INCARNATION, int(self.now_s * 1e9)
            ).pack(),
        )
        self._stack.callback(os.close, memory)
        self._process, self._dies = os.pipe()  # readable once it has "ended"
        for descriptor in (self._process, self._dies):
            self._stack.callback(os.close, descriptor)
        listening = [(f"fuzz/{self.port}", self._listening.detach())]
        self.server = SidecarServer(
            memory, self._process, pair.detach(), listening, self.key
        )
        self.clients: list[Client] = []
        self.nonces = 0
        self.is_over = False  # half a minute after the end of the worker

    def close(self) -> None:
        for client in self.clients:
            client.sock.close()
        server = self.server
        held = (server._asked, server._doors)  # noqa: SLF001
        for descriptor in (descriptor for each in held for descriptor in each.values()):
            descriptor.sock.close()
        for giver in server._givers.values():  # noqa: SLF001
            giver.close()
        server._pair.close()  # noqa: SLF001
        self.worker.close()
        self._stack.close()

    def turn(self, after_s: float = 0.0) -> None:
        """Let the server do what it does now."""
        self.now_s += after_s
        for _ in range(8):
            self.is_over = not self.server.turn(waits=False)
        assert len(self.server._asked) <= CONNECTIONS_MAX  # noqa: SLF001
        with contextlib.suppress(BlockingIOError):
            while True:
                _, passed, _, _ = socket.recv_fds(self.worker, 1, 4)
                for descriptor in passed:
                    os.close(descriptor)
        for client in self.clients:
            client.receive()

    def query(self, choices: Choices) -> bytes:
        """Return a query, which may be wrong in one place."""
        self.nonces += 1
        nonce = self.nonces.to_bytes(query.NONCE_BYTES)
        incarnation = INCARNATION if choices.below(4) else choices.number()
        key = self.key if choices.below(4) else query.key_from(b"", incarnation)
        record = bytearray(query.pack_query(key, incarnation, nonce))
        if choices.below(4) == 3:
            record[choices.below(len(record))] ^= 1 + choices.below(255)
        return bytes(record)

    def step(self, choices: Choices) -> None:
        how = choices.below(10)
        if self.is_over:
            return
        if how <= 1 and len(self.clients) < CLIENTS_MAX:
            self.clients.append(Client(self.port))
        elif how == 8:
            self.turn(choices.below(60) / 20)
        elif how == 9 and choices.below(8) == 7:
            os.write(self._dies, b"1")
        elif self.clients:
            self._act(how, self.clients[choices.below(len(self.clients))], choices)
        self.turn()

    def _act(self, how: int, client: Client, choices: Choices) -> None:
        if how in (2, 3):
            client.send(self.query(choices))
        elif how == 4:
            record = self.query(choices)
            client.send(record[: 1 + choices.below(len(record))])
        elif how == 5:
            client.send(choices.take(1 + choices.below(80)))
        elif how == 6:
            client.send((b"A", b"ARWQ", b"ARPC\x01", b"GET / ")[choices.below(4)])
        else:
            client.sock.close()
            self.clients.remove(client)

    def must_hold(self) -> None:
        """Only queries of the key were answered; an honest one still is."""
        for client in self.clients:
            assert not client.got or client.sent.startswith(query.ASKED), client.sent
            assert len(client.got) <= query.ANSWER_BYTES
            if client.got:
                record = client.sent[: query.QUERY_BYTES]
                nonce = query.read_query(self.key, INCARNATION, record)
                assert nonce is not None
                answer = query.read_answer(self.key, INCARNATION, nonce, client.got)
                assert answer in STATES
        self.turn(process.CONNECTION_S + QUERY_WAITS_S)
        if self.is_over:
            return
        honest = Client(self.port)
        self.clients.append(honest)
        nonce = bytes(query.NONCE_BYTES)
        honest.send(query.pack_query(self.key, INCARNATION, nonce))
        for _ in range(3):
            self.turn(process.PATIENCE_S)
        answer = query.read_answer(self.key, INCARNATION, nonce, honest.got)
        assert self.is_over or answer in STATES, honest.got


def check(data: bytes) -> None:
    """Play until the choices are used up."""
    with pytest.MonkeyPatch.context() as patch:
        world, choices = World(patch), Choices(data)
        try:
            for _ in range(STEPS_MAX):
                if not choices:
                    break
                world.step(choices)
            world.must_hold()
        finally:
            world.close()


def seeds() -> Iterator[bytes]:
    """Give games with answers, with evictions, and with a worker that ends."""
    ask = bytes([0, 8, 1, 2, 0, 1, 1, 0, 8, 1])
    yield ask
    yield bytes([0, 8, 1] * 8) + ask
    yield bytes([9, 7]) + ask
    yield bytes([0, 8, 1, 6, 0, 0, 8, 59, 0, 8, 1, 6, 0, 2, 0, 8, 1, 5, 1, 3, 1, 2, 3])
    yield bytes([0, 8, 1, 4, 0, 1, 1, 0, 20, 7, 0]) + ask
