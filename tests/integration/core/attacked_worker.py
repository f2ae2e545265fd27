"""A worker in a process of its own, to be attacked by peers that are let in."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack

from asyncrpc.core.serde import kinds
from asyncrpc.core.wire.frames import (
    HEADER,
    HEADER_BYTES,
    Flags,
    FrameKind,
    data_prefix,
    prefix,
)
from tests.forked import forked
from tests.integration.core.raw_connections import Stream, hello, prove

MIB: Final = 1 << 20
SECRET: Final = "a secret of 32 characters or more"
CREDIT: Final = FrameKind.CREDIT
CHUNK_BYTES: Final = 512 << 10
ANSWER_S: Final = 60.0  # only a failure reaches it
MODULE: Final = __name__

PROGRAM: Final = f"""
import asyncio, logging, os, asyncrpc
from tests.integration.core import attacked_worker

logging.lastResort = None  # nobody reads what it would print


async def main():
    options = asyncrpc.Options(
        policy=asyncrpc.Policy.STRICT,
        allow=("{MODULE}:*",),
        secret="{SECRET}",
        network=asyncrpc.NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    )
    async with asyncrpc.Worker(
        "ps", rank=0, rendezvous=asyncrpc.LocalRendezvous(1), options=options
    ) as worker:
        print(worker.addresses[0], os.getpid(), flush=True)
        await attacked_worker.measure_lag()

runner = asyncrpc.run if os.environ.get("UVLOOP") else asyncio.run
runner(main())
"""

_lags_s: list[float] = []


async def measure_lag() -> None:
    """Note by how much the loop is late, for ever."""
    loop = asyncio.get_running_loop()
    while True:
        due_s = loop.time() + 0.01
        await asyncio.sleep(0.01)
        _lags_s.append(loop.time() - due_s)


async def worst_lag_s() -> float:
    worst_s = max(_lags_s, default=0.0)
    _lags_s.clear()
    return worst_s


async def size_of(value: Any) -> int:
    return len(value)


async def text_of(nbytes: int) -> str:
    return "x" * nbytes


async def wait(_: Any = None) -> None:
    await asyncio.Event().wait()


@dataclass
class Victim:
    """A worker in a process of its own.

    Attributes:
        host: of its address.
        port: of its address.
        pid: of its process.
    """

    host: str
    port: int
    pid: int

    def _status(self, name: str) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        line = next(text for text in status.splitlines() if text.startswith(name))
        return int(line.split()[1]) << 10

    @property
    def resident_bytes(self) -> int:
        return self._status("VmRSS")

    @property
    def peak_bytes(self) -> int:
        """The most since `forget_peak`."""
        return self._status("VmHWM")

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")


@contextlib.contextmanager
def victim(**environment: str) -> Iterator[Victim]:
    """Start a worker to be attacked."""
    with forked(PROGRAM, **environment) as program:
        for line in program.output:
            if line.startswith("tcp://"):
                address, pid = line.split()
                host, port = address.removeprefix("tcp://").rsplit(":", 1)
                yield Victim(host, int(port), int(pid))
                break
        program.kill()


class RawPeer:
    """A peer that has been let in, and sends what it wants.

    Attributes:
        incarnation: this life of it.
        granted_bytes: credit that the victim has given for its requests.
        sent_bytes: in messages.
        first_id: added to the number of each call.
    """

    def __init__(self, stream: Stream, victim: Victim) -> None:
        self.reader, self.writer = stream
        self.victim = victim
        self.incarnation = int.from_bytes(os.urandom(8), "little")
        self.granted_bytes = self.sent_bytes = 0
        self.first_id = 0

    def send(
        self,
        kind: FrameKind,
        head: list[Any],
        control: bytes,
        call_id: int = 1,
        payload: bytes = b"",
        *,
        announced: int = 0,
    ) -> None:
        """Write a frame, as fast as it goes."""
        nbytes = announced or len(payload)
        frame = prefix(
            kind,
            self.first_id + call_id,
            flags=Flags.DEFERRED if announced else 0,
            aux=-1 if kind in (FrameKind.REQUEST, FrameKind.SERVICE) else 0,
            head=msgpack.packb(head),
            control=control,
            lengths=[nbytes] if nbytes else [],
            payload_bytes=nbytes,
        )
        self.writer.write(frame + payload)
        self.sent_bytes += len(frame) + len(payload)

    def call(self, name: str, control: bytes, call_id: int = 1, **more: Any) -> None:
        """Write a request for a function of this module."""
        head = [[0, f"{MODULE}:{name}"], None]
        self.send(FrameKind.REQUEST, head, control, call_id, **more)

    async def send_data(self, call_id: int, payload: bytes) -> None:
        """Write a payload that has been announced."""
        for at in range(0, len(payload), CHUNK_BYTES):
            chunk = payload[at : at + CHUNK_BYTES]
            serial = self.first_id + call_id
            self.writer.write(data_prefix(serial, at, len(chunk)) + chunk)
            self.sent_bytes += len(chunk)
            await self.writer.drain()

    async def frame(self) -> tuple[int, int, bytes]:
        """Return kind, call and control part of the next frame."""
        fields = HEADER.unpack(await self.reader.readexactly(HEADER_BYTES))
        kind, flags, head_bytes, control_bytes, count = fields[2:7]
        call_id, payload_bytes = fields[8:]
        await self.reader.readexactly(head_bytes)
        control = await self.reader.readexactly(control_bytes)
        inline = 0 if flags & Flags.DEFERRED else payload_bytes
        await self.reader.readexactly(8 * count + inline)
        return kind, call_id, control

    async def until(self, kind: FrameKind, call_id: int) -> bool:
        """Read until such a frame; return False if the connection ends before."""
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_S):
                await self.writer.drain()
                while (await self.frame())[:2] != (kind, call_id):
                    pass
            return True
        return False

    async def drain(self) -> bool:
        """Wait until all has been handled; return whether the connection is open."""
        if self.writer.is_closing():
            return False
        self.writer.write(prefix(FrameKind.PING, 7))
        return await self.until(FrameKind.PONG, 7)

    async def wants(self, call_id: int, nbytes: int) -> bool:
        """Ask for credit; return whether there is some at once."""
        if self.writer.is_closing():
            return False
        call_id += self.first_id
        self.writer.write(prefix(FrameKind.WANT, call_id, aux=nbytes))
        self.writer.write(prefix(FrameKind.PING, call_id))
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            async with asyncio.timeout(ANSWER_S):
                while True:
                    kind, of_call, _ = await self.frame()
                    if of_call == call_id and kind in (CREDIT, FrameKind.PONG):
                        self.granted_bytes += nbytes * (kind == CREDIT)
                        return kind == CREDIT
        return False


@contextlib.asynccontextmanager
async def raw_peer(target: Victim, name: str = "liar") -> AsyncIterator[RawPeer]:
    """Connect to a victim, as one who knows the secret."""
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        await prove((reader, writer), SECRET)
        peer = RawPeer((reader, writer), target)
        writer.write(hello(name, incarnation=peer.incarnation) + prefix(FrameKind.ACK))
        yield peer
    finally:
        writer.transport.abort()


def flat(tree: bytes) -> bytes:
    return kinds.FLAT + tree


async def honest_call(target: Victim, name: str = "worst_lag_s") -> Any:
    """Return what a newcomer gets from the victim."""
    async with raw_peer(target, f"honest-{os.urandom(4).hex()}") as peer:
        head = [[0, f"{MODULE}:{name}"], None]
        peer.send(FrameKind.REQUEST, head, flat(b"\x92\x90\x80"))
        async with asyncio.timeout(ANSWER_S):
            while True:
                kind, _, control = await peer.frame()
                if kind in (FrameKind.RESPONSE, FrameKind.ERROR):
                    assert kind == FrameKind.RESPONSE, control
                    return msgpack.unpackb(control[kinds.LENGTH_BYTES :])
