"""Large payloads are copied in pieces, in turns, and the loop goes on in between."""

from __future__ import annotations

import asyncio
from functools import partial

from asyncrpc.core.payloads.mover import COPY_PIECE_BYTES, Copying, CopyQueue
from asyncrpc.testing.loop import SimLoop

PIECES = 3


def source(byte: int, pieces: int = PIECES) -> memoryview:
    return memoryview(bytes([byte]) * (pieces * COPY_PIECE_BYTES - 1))


def target() -> memoryview:
    return memoryview(bytearray(PIECES * COPY_PIECE_BYTES - 1))


class TestQueue:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_copies_take_turns_piece_by_piece(self) -> None:
        queue = CopyQueue(asyncio.get_running_loop())
        whole: list[int] = []
        targets = [target(), target()]
        for number, place in enumerate(targets):
            copies = [(place, source(number + 1))]
            queue.add(Copying(copies, partial(whole.append, number)))
        assert targets[0][COPY_PIECE_BYTES - 1] == 1  # the first piece, at once
        assert targets[0][COPY_PIECE_BYTES] == 0
        assert targets[1][0] == 0
        for _ in range(2 * PIECES - 1):
            await asyncio.sleep(0)
        assert whole == [0, 1]
        assert [bytes(place) for place in targets] == [
            bytes(source(1)),
            bytes(source(2)),
        ]

    async def test_removed_copy_is_copied_no_further(self) -> None:
        queue = CopyQueue(asyncio.get_running_loop())
        place, whole = target(), []
        copying = Copying([(place, source(1))], lambda: whole.append(1))
        queue.add(copying)
        queue.remove(copying)
        for _ in range(2 * PIECES):
            await asyncio.sleep(0)
        assert place[COPY_PIECE_BYTES] == 0
        assert whole == []


def test_short_copies_share_a_piece() -> None:
    places = [memoryview(bytearray(3)) for _ in range(4)]
    copying = Copying([(place, memoryview(b"abc")) for place in places], lambda: None)
    assert copying.step()
    assert [bytes(place) for place in places] == [b"abc"] * 4
