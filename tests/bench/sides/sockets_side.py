"""Two blocking sockets with one connection: what TCP moves here, and no more than that.

Rank 1 reads a payload into the same warm memory each time.  One way it then answers
with a byte; echoed, with the payload.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Mapping

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.bench import workloads as w
from tests.bench.harness import Budget, gb_per_second, measure
from tests.bench.sides.blocking import Measured, lead
from tests.bench.sides.side import Arguments, start, warm_ups_for

TASK = struct.Struct("<Q?")  # of one request: bytes of its payload, whether to echo it
HOST = "127.0.0.1"


def memory(nbytes: int) -> memoryview:
    return torch.ones(nbytes, dtype=torch.uint8).numpy().data


def read_all(sock: socket.socket, into: memoryview) -> bool:
    """Fill the memory; return whether the peer has sent so much."""
    done = 0
    while done < len(into):
        nbytes = sock.recv_into(into[done:])
        if not nbytes:
            return False
        done += nbytes
    return True


def serve(sock: socket.socket) -> None:
    """Answer until the peer has ended."""
    task, place = memoryview(bytearray(TASK.size)), memory(0)
    while read_all(sock, task):
        nbytes, is_echo = TASK.unpack(task)
        if len(place) != nbytes:
            place = memory(nbytes)
        if not read_all(sock, place):
            return
        sock.sendall(place if is_echo else b"x")


def bandwidth(sock: socket.socket, nbytes: int, *, is_echo: bool) -> Measured:
    def run(budget: Budget) -> list[float]:
        payload, task = memory(nbytes), TASK.pack(nbytes, is_echo)
        answer = memory(nbytes if is_echo else 1)

        def exchange() -> None:
            sock.sendall(task)
            sock.sendall(payload)
            assert read_all(sock, answer)

        times_s = measure(exchange, budget, warm_ups=warm_ups_for(nbytes))
        return [gb_per_second(times_s, nbytes)]

    return run


def measured(sock: socket.socket) -> Mapping[str, Measured]:
    return {
        f"sockets_{name}{size}": bandwidth(sock, size << 20, is_echo=is_echo)
        for size in w.TCP_SIZES_MIB
        for name, is_echo in (("", False), ("echo_", True))
    }


def main(arguments: Arguments) -> None:
    is_first = arguments.rank == 0
    store = TCPStore(HOST, arguments.port, is_master=is_first)
    if is_first:
        port = int(store.get("port"))  # it waits until rank 1 listens
        with socket.create_connection((HOST, port)) as sock:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            lead(measured(sock), arguments)
        return
    with socket.create_server((HOST, 0)) as server:
        store.set("port", str(server.getsockname()[1]))
        sock, _ = server.accept()
    with sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        serve(sock)


if __name__ == "__main__":
    sys.exit(start(main))
