"""What does TLS cost, in small calls and in bulk?

Two processes, TCP on loopback, with and without TLS, in turn: a small call one at a
time, and a tensor of 16 MiB one way.  The lanes are encrypted, too.  CPU is that of the
caller's process, which a busy machine does not change.

    $ python -m tests.bench.bench_tls
    $ python -m tests.bench.bench_tls --starts 5
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

import asyncrpc
from asyncrpc import LimitOptions, NetworkOptions, Options, Tls, Worker
from tests.bench.harness import (
    WARM_UPS,
    Budget,
    gb_per_second,
    measure_async,
    p50_p99_us,
)
from tests.certificates import Authority

BULK_MIB = 16
BUDGET = Budget(2.0)
TCP = Options(
    secret="of this measurement",
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    limits=LimitOptions(shared_memory_bytes=0),
)


class Figures(NamedTuple):
    """What one pair of processes gave."""

    p50_us: float
    p99_us: float
    call_cpu_us: float
    gb_s: float
    bulk_cpu_ms: float


async def add(left: int, right: int) -> int:
    return left + right


@asyncrpc.on_loop
def length(tensor: torch.Tensor) -> int:
    return tensor.numel()


def options_for(certificate: str, ca: str) -> Options:
    tls = Tls(certificate=certificate, ca=ca) if certificate else None
    return replace(TCP, tls=tls)


async def serve(certificate: str, ca: str) -> None:
    """Be the other process: say where it listens, and end with its input."""
    options = options_for(certificate, ca)
    where = {"b": "tcp://127.0.0.1:9"}
    async with Worker("b", rendezvous=where, options=options) as worker:
        print(worker.addresses[0], flush=True)
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


@contextlib.asynccontextmanager
async def pair(certificate: str, ca: str) -> AsyncIterator[Worker]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __spec__.name, "--serve", certificate, ca),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    address = (await process.stdout.readline()).decode().strip()
    where = {"a": "tcp://127.0.0.1:9", "b": address}
    options = options_for(certificate, ca)
    try:
        async with Worker("a", rendezvous=where, options=options) as worker:
            yield worker
    finally:
        process.stdin.close()
        await process.wait()


async def measure(certificate: str, ca: str) -> Figures:
    async with pair(certificate, ca) as worker:
        peer = worker.peer("b")

        async def small() -> None:
            await peer.call(add, 1, 2)

        calls_s, calls_cpu_s = await with_cpu(small)
        p50_us, p99_us = p50_p99_us(calls_s)
        tensor = torch.ones(BULK_MIB << 20, dtype=torch.uint8)
        bulk_s, bulk_cpu_s = await with_cpu(partial(peer.call, length, tensor))
        return Figures(
            p50_us,
            p99_us,
            calls_cpu_s * 1e6,
            gb_per_second(bulk_s, tensor.nbytes),
            bulk_cpu_s * 1e3,
        )


async def with_cpu(
    action: Callable[[], Awaitable[Any]],
) -> tuple[Sequence[float], float]:
    """Return the times of an action in seconds, and the CPU that one of them took."""
    for _ in range(WARM_UPS):
        await action()
    begun_s = time.process_time()
    times_s = await measure_async(action, BUDGET, warm_ups=0)
    return times_s, (time.process_time() - begun_s) / len(times_s)


def show(name: str, figures: Sequence[Figures]) -> None:
    medians = [statistics.median(column) for column in zip(*figures, strict=True)]
    print(f"{name:>6}" + "".join(f"{median:>13.2f}" for median in medians))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        asyncrpc.run(serve(*options.serve))
        return
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority(Path(folder))
        sides = {"tcp": "", "tls": str(authority.issue())}
        results: dict[str, list[Figures]] = {name: [] for name in sides}
        for _ in range(options.starts):
            for name, certificate in sides.items():
                measured = asyncrpc.run(measure(certificate, str(authority.path)))
                results[name].append(measured)
    print(f"{ssl.OPENSSL_VERSION}; median of {options.starts} starts")
    heads = ("p50, us", "p99, us", "CPU, us", "GB/s", "CPU, ms")
    print(" " * 6 + "".join(f"{head:>13}" for head in heads))
    for name, figures in results.items():
        show(name, figures)


if __name__ == "__main__":
    main()
