"""What mypy makes of calls: the callee's signature is checked, its result is typed.

Checked with the rest of tests by `make type`, and never run.
"""

from collections.abc import AsyncIterator, Iterator
from typing import assert_type

from asyncrpc import Peer, PeerGroup


async def double(x: int, *, times: int = 2) -> float:
    return float(x * times)


def name_of(x: int) -> str:
    return str(x)


async def rows(path: str) -> AsyncIterator[list[int]]:
    yield [len(path)]


def lines(path: str) -> Iterator[str]:
    yield path


async def check(peer: Peer) -> None:
    assert_type(await peer.call(double, 3, times=4), float)
    assert_type(await peer.call(name_of, 3), str)
    await peer.call(double, "3")  # type: ignore[call-overload]
    async for row in peer.stream(rows, "a"):
        assert_type(row, list[int])
    async for line in peer.stream(lines, "a"):
        assert_type(line, str)
    peer.stream(rows, 3)  # type: ignore[call-overload]


async def check_group(group: PeerGroup) -> None:
    assert_type(await group.call(double, 3, times=4), list[float])
    assert_type(await group.call(name_of, 3), list[str])
    async for reply in group.call(double, 3):
        assert_type(reply.result(), float)
    await group.call(double, "3")  # type: ignore[call-overload]
