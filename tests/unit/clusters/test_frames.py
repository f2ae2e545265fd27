"""Frames of a host server: whatever arrives, the program gets frames or an error."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import msgpack
import pytest

from asyncrpc.clusters.remote.frames import (
    FRAME_BYTES_MAX,
    MARKER,
    NOISE_BYTES_MAX,
    Begun,
    BrokenStreamError,
    Ended,
    Frame,
    HostFrames,
    HostHello,
    Printed,
    Ready,
    SignalWorker,
    StartFailed,
    StartWorker,
    decode,
    encode,
)

FRAMES: list[Frame] = [
    HostHello("0.1.0", "2.13.0"),
    StartWorker(1, b"order"),
    SignalWorker(1, 15),
    Begun(1, 4711),
    Ready(1, 2**63, "tcp://a:1 uds:///b"),
    StartFailed(1, "no", "Traceback"),
    Ended(1, "its process exited with code 3"),
    Printed("w0", "stdout", b"line\n"),
]


def reader_of(data: bytes, size: int) -> HostFrames:
    pieces: Iterator[bytes] = (data[i : i + size] for i in range(0, len(data), size))

    async def read(_: int) -> bytes:
        return next(pieces, b"")

    return HostFrames(read)


@pytest.mark.parametrize("size", [1, 7, 1 << 20])
async def test_stream_cut_anywhere_reads_the_same(size: int) -> None:
    noise = b"Welcome to this host\n" * 100
    reader = reader_of(noise + MARKER + b"".join(map(encode, FRAMES)), size)
    await reader.skip_to_marker()
    assert [await reader.frame() for _ in FRAMES] == FRAMES
    with pytest.raises(BrokenStreamError, match="has ended"):
        await reader.frame()


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        b"\xc1",
        msgpack.packb(1),
        msgpack.packb([]),
        msgpack.packb(["Nothing"]),
        msgpack.packb([["Begun"], 1, 2]),
        msgpack.packb(["Begun", 1]),
        msgpack.packb(["Begun", 1, 2, 3]),
        msgpack.packb(["Begun", 1, "2"]),
        msgpack.packb(["Begun", True, 2]),
        msgpack.packb(["Printed", "w0", "stdout", "text"]),
        msgpack.packb({"Begun": 1}),
    ],
)
def test_malformed_frame_is_refused(packed: bytes) -> None:
    with pytest.raises(BrokenStreamError, match="no frame"):
        decode(packed)


async def test_lengths_are_bounded() -> None:
    length = (FRAME_BYTES_MAX + 1).to_bytes(4, "big")
    with pytest.raises(BrokenStreamError, match="would have"):
        await reader_of(length, 4).frame()
    with pytest.raises(BrokenStreamError, match="without an end"):
        await reader_of(b"x" * 2 * NOISE_BYTES_MAX, 4096).skip_to_marker()
    long = encode(StartFailed(1, "x" * FRAME_BYTES_MAX, "y" * FRAME_BYTES_MAX))
    assert len(long) < FRAME_BYTES_MAX
    assert isinstance(await reader_of(long, 1 << 20).frame(), StartFailed)
    await asyncio.sleep(0)
