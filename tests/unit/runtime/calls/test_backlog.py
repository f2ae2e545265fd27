"""What waits while a peer does not take its answers, and when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from asyncrpc.errors import OverloadedError
from asyncrpc.runtime.calls.backlog import (
    PEERS,
    Backlog,
    OutboundBudget,
    nobody_waits,
)

PART = 1 << 20
LIMIT = PEERS * PART


class Connection:
    def __init__(self) -> None:
        self.stream = self
        self.on_taken: Callable[[], None] = nobody_waits
        self.kept_bytes = 0

    def count_kept(self) -> int:
        return self.kept_bytes

    async def writable(self) -> None: ...

    def take(self, nbytes: int) -> None:
        self.kept_bytes -= nbytes
        self.on_taken()


def pressed(budget: OutboundBudget | None = None) -> tuple[Connection, Backlog]:
    connection = Connection()
    backlog = Backlog(connection, budget or OutboundBudget(LIMIT))
    connection.kept_bytes = PART + 1
    backlog.on_large("big")
    return connection, backlog


async def test_a_peer_that_takes_its_answers_makes_nothing_wait() -> None:
    connection = Connection()
    backlog = Backlog(connection, OutboundBudget(LIMIT))
    connection.kept_bytes = PART
    backlog.on_large("big")
    assert not backlog.must_wait("big")
    assert connection.on_taken is nobody_waits
    await backlog.room()


async def test_only_what_answers_with_much_waits_up_to_twice_the_part() -> None:
    connection, backlog = pressed()
    assert backlog.must_wait("big")
    assert not backlog.must_wait("small")
    connection.kept_bytes = 2 * PART + 1
    backlog.look()
    assert backlog.must_wait("small")
    connection.take(PART + 1)
    assert not backlog.must_wait("big")


async def test_what_waits_begins_one_after_the_other() -> None:
    connection, backlog = pressed()
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        connection.kept_bytes += PART + 1  # its answer

    for number in range(3):
        backlog.admit(10)
        backlog.hold(lambda number=number: begin(number))  # type: ignore[misc]
    for number in range(3):
        assert begun == list(range(number))
        connection.take(PART + 1)
        await asyncio.sleep(0)
    assert begun == [0, 1, 2]


async def test_an_item_waits_for_its_turn_and_a_lost_peer_ends_the_wait() -> None:
    connection, backlog = pressed()
    waits = [asyncio.create_task(backlog.room()) for _ in range(3)]
    await asyncio.sleep(0)
    waits[1].cancel()
    connection.take(PART + 1)
    await waits[0]
    await waits[2]
    connection.kept_bytes = PART + 1
    backlog.look()
    last = asyncio.create_task(backlog.room())
    await asyncio.sleep(0)
    assert not last.done()
    backlog.close()
    await last


async def test_requests_that_wait_have_a_limit_of_bytes_too() -> None:
    connection, backlog = pressed()
    backlog.admit(PART)
    backlog.hold(lambda: None)
    with pytest.raises(OverloadedError, match="has not taken 1048577 bytes"):
        backlog.admit(1)
    connection.take(PART)
    backlog.admit(PART)


async def test_all_peers_together_have_a_limit() -> None:
    budget = OutboundBudget(LIMIT)
    others = [pressed(budget) for _ in range(PEERS)]
    connection = Connection()
    backlog = Backlog(connection, budget)
    connection.kept_bytes = PART // 2
    backlog.on_large("big")
    assert backlog.must_wait("big")
    for other, their_backlog in others:
        other.take(PART + 1)
        their_backlog.close()
    backlog.look()
    assert not backlog.must_wait("big")
    connection.kept_bytes = 0  # one that has nothing waits for nobody
    backlog.look()
    assert not backlog.is_pressed
