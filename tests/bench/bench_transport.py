"""How fast is each transport, between two processes?

Echo: 64 bytes there and back, one at a time.  One way: a payload from one reused buffer
into another, in place, then one byte back; GB/s of payload.  `mem` runs in one process,
so its figure is the cost of the loop and of one memcpy.

    $ python -m tests.bench.bench_transport
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path

import uvloop

from asyncrpc.core.transport.abc import Connector, Transport
from asyncrpc.core.transport.address import Address
from asyncrpc.core.transport.memory import MemoryHub
from asyncrpc.core.transport.tcp import TcpConnector
from asyncrpc.core.transport.uds import UdsConnector
from asyncrpc.errors import TransportError

ECHO_BYTES = 64
SIZES_MIB = (1, 16, 256)
SECONDS_EACH = 0.7
LENGTH = struct.Struct("<Q")
SOURCE = memoryview(bytearray(max(SIZES_MIB) << 20))


class Plain:
    """What the handlers share."""

    transport: Transport

    def connection_made(self, transport: Transport) -> None:
        self.transport = transport

    def connection_lost(self, error: TransportError | None, /) -> None:
        pass

    def pause_writing(self) -> None:
        pass

    def resume_writing(self) -> None:
        pass


class Sink(Plain):
    """Takes a length and that many bytes, and answers one byte; 0: 64 bytes, echoed."""

    def __init__(self) -> None:
        self._header = memoryview(bytearray(LENGTH.size))
        self._landing = memoryview(bytearray(max(SIZES_MIB) << 20))
        self._start()

    def _start(self) -> None:
        self._target, self._filled, self._in_header = self._header, 0, True

    def get_buffer(self, sizehint: int, /) -> memoryview:
        return self._target[self._filled :]

    def buffer_updated(self, nbytes: int, /) -> None:
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        if self._in_header:
            (length,) = LENGTH.unpack(self._header)
            self._target = self._landing[: length or ECHO_BYTES]
            self._filled, self._in_header = 0, False
        else:
            echo = len(self._target) == ECHO_BYTES
            self.transport.send([self._target if echo else b"!"])
            self._start()


class Source(Plain):
    """Sends, and waits for the answer."""

    def __init__(self) -> None:
        self._landing = bytearray(ECHO_BYTES)
        self._missing = 0
        self._answered: asyncio.Future[None] | None = None

    def get_buffer(self, sizehint: int, /) -> bytearray:
        return self._landing

    def buffer_updated(self, nbytes: int, /) -> None:
        self._missing -= nbytes
        if not self._missing and self._answered is not None:
            self._answered.set_result(None)

    async def ask(self, length: int) -> None:
        payload = SOURCE[: length or ECHO_BYTES]
        self._missing = 1 if length else ECHO_BYTES
        self._answered = asyncio.get_running_loop().create_future()
        self.transport.send([LENGTH.pack(length), payload])
        await self._answered


async def measure(source: Source, length: int) -> float:
    """Return the median seconds of one round."""
    times_s: list[float] = []
    end_s = time.perf_counter() + SECONDS_EACH
    while time.perf_counter() < end_s or len(times_s) < 3:
        start_s = time.perf_counter()
        await source.ask(length)
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s)


def connector_for(address: Address) -> Connector:
    return TcpConnector() if address.scheme == "tcp" else UdsConnector()


async def serve(address: Address) -> None:
    listener = await connector_for(address).listen(address, Sink)
    print(listener.addresses[0], flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await listener.close()


@contextlib.asynccontextmanager
async def connected(address: Address) -> AsyncIterator[Source]:
    source = Source()
    if address.scheme == "mem":
        hub = MemoryHub()
        await hub.connector().listen(address, Sink)
        await hub.connector().connect(address, source)
        yield source
        source.transport.close()
        return
    command = [sys.executable, "-m", "tests.bench.bench_transport", "--serve"]
    with subprocess.Popen(  # noqa: ASYNC220  (nothing else runs yet)
        [*command, str(address)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as server:
        assert server.stdout is not None
        at = Address.parse(server.stdout.readline().decode().strip())
        await connector_for(at).connect(at, source)
        yield source
        source.transport.close()
        server.communicate()


async def compare() -> None:
    heads = [f"{size} MiB, GB/s" for size in SIZES_MIB]
    print("".join(f"{head:>16}" for head in ("transport", "echo p50, us", *heads)))
    with tempfile.TemporaryDirectory(prefix="arpc-") as directory:
        addresses = {
            "tcp v4": Address("tcp", "127.0.0.1"),
            "tcp v6": Address("tcp", "::1"),
            "uds": Address("uds", str(Path(directory) / "sink")),
            "mem": Address("mem", "sink"),
        }
        for name, address in addresses.items():
            async with connected(address) as source:
                cells = [f"{await measure(source, 0) * 1e6:.1f}"]
                for size in SIZES_MIB:
                    took_s = await measure(source, size << 20)
                    cells.append(f"{(size << 20) / took_s / 1e9:.2f}")
            print("".join(f"{cell:>16}" for cell in (name, *cells)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", type=Address.parse)
    parser.add_argument("--asyncio", action="store_true", help="not on uvloop")
    chosen = parser.parse_args()
    factory = asyncio.SelectorEventLoop if chosen.asyncio else uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(serve(chosen.serve) if chosen.serve else compare())


if __name__ == "__main__":
    main()
