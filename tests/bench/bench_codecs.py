"""When does a codec pay?

Each packs and unpacks 64 MiB, in one thread: how much shorter it gets, and how fast.
A codec shortens a call if it packs and unpacks faster than the link carries what it
saves: with ratio r and a link of L GB/s, if 1/pack + 1/unpack < (1 - 1/r) / L.  The
last column is the L below which that is so; a call packs while others use the link, so
several calls at a time gain earlier.

The second table is what a call of 64 MiB takes between two processes over TCP on this
host, and how long the caller's loop was held up meanwhile.

    $ make bench ONLY=codecs
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import torch

from asyncrpc.core.options import CallOptions
from asyncrpc.core.serde import Codec, FunctionTable, Policy, compression_named
from asyncrpc.testing import ProcessCluster

SIZE_BYTES: Final = 64 << 20
ROUNDS: Final = 3
CODECS: Final = (
    *("lz4", "zstd", "fp16", "bf16", "int8"),
    *("fp16+zstd", "bf16+zstd", "int8+zstd"),
)
CODEC: Final = Codec(FunctionTable(Policy.STRICT))


def english(size_bytes: int) -> bytes:
    """Return text of words as frequent as words are: Zipf's law."""
    draw = np.random.default_rng(0)
    letters = np.frombuffer(b"etaoinshrdlucmfw", np.uint8)
    words = [letters[draw.integers(0, 16, n)].tobytes() for n in range(2, 12)] * 500
    chosen = np.minimum(draw.zipf(1.3, size_bytes // 6), len(words)) - 1
    return b" ".join(words[index] for index in chosen)[:size_bytes]


PAYLOADS: Final[dict[str, Callable[[], Any]]] = {
    "normal float32": lambda: torch.randn(SIZE_BYTES // 4),
    "zeros float32": lambda: torch.zeros(SIZE_BYTES // 4),
    "text": lambda: english(SIZE_BYTES),
}


def least_s(function: Callable[[], object]) -> float:
    times_s = []
    for _ in range(ROUNDS):
        start_s = time.perf_counter()
        function()
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)


def bench(name: str, value: Any) -> tuple[float, float, float]:
    """Return the ratio, and GB/s of packing and of unpacking."""
    compression = compression_named(name)
    assert compression is not None
    unpacked = CODEC.encode_for(compression, value)
    packed = unpacked.pack()
    # What is packed arrives in memory of its own, which may be written to.
    buffers = [np.frombuffer(view, np.uint8).copy().data for view in packed.buffers]
    size_bytes = unpacked.payload_bytes
    pack_s = least_s(unpacked.pack)
    unpack_s = least_s(lambda: CODEC.decode(packed.control, buffers))
    return (
        size_bytes / packed.payload_bytes,
        size_bytes / pack_s / 1e9,
        size_bytes / unpack_s / 1e9,
    )


def length(value: Any) -> int:
    """Return how long a payload is: what the called function does with it."""
    return len(value)


async def held_up_s(until: asyncio.Future[Any]) -> float:
    """Return the longest time that this loop did not run what was ready."""
    longest_s, last_s = 0.0, time.perf_counter()
    while not until.done():
        await asyncio.sleep(0)
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
    return longest_s


async def bench_calls() -> None:
    async with ProcessCluster(["b"], transport="tcp") as worker:
        value = torch.randn(SIZE_BYTES // 4)
        for name in ("", *CODECS):
            times_s, held_s = [], []
            for _ in range(1 + ROUNDS):
                start_s = time.perf_counter()
                options = CallOptions(codec=name)
                call = worker.parts.start_call("b", length, (value,), options=options)
                held_s.append(await held_up_s(call))
                assert await call == len(value)
                times_s.append(time.perf_counter() - start_s)
            print(
                f"{name or 'none':>12} {min(times_s[1:]) * 1e3:>12.1f}"
                f" {min(held_s[1:]) * 1e3:>16.2f}"
            )


def main() -> None:
    print(f"{'codec':>12} {'payload':>16} {'ratio':>8} {'pack, GB/s':>12}", end="")
    print(f" {'unpack, GB/s':>14} {'pays below, GB/s':>18}")
    for payload, make in PAYLOADS.items():
        value = make()
        for name in CODECS:
            if isinstance(value, bytes) and name not in {"lz4", "zstd"}:
                continue
            ratio, pack, unpack = bench(name, value)
            pays = (1 - 1 / ratio) / (1 / pack + 1 / unpack)
            print(f"{name:>12} {payload:>16} {ratio:>8.2f} {pack:>12.2f}", end="")
            print(f" {unpack:>14.2f} {pays:>18.2f}")
    print(f"\n{'codec':>12} {'call, ms':>12} {'loop held, ms':>16}")
    asyncio.run(bench_calls())


if __name__ == "__main__":
    main()
