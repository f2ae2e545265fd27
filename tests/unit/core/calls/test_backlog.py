"""What waits while a peer does not take its answers, and when it begins."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from asyncrpc.core.calls.peer_memory import (
    PEERS,
    Backlog,
    OutboundBudget,
    PeerMemory,
)
from asyncrpc.core.transport.byte_stream import nobody_waits
from asyncrpc.errors import AsyncRpcError, MalformedError

PART = 1 << 20
LIMIT = PEERS * PART
GIVEN_UP = 9 * PART + PART // 2  # with 8 parts in the account


class Connection:
    def __init__(self) -> None:
        self.stream = self
        self.on_taken: Callable[[], None] = nobody_waits
        self.on_kept: Callable[[], None] = nobody_waits
        self.kept_bytes = self.written_bytes = 0
        self.room = asyncio.Event()
        self.room.set()
        self.given_up: AsyncRpcError | None = None

    def give_up(self, error: AsyncRpcError) -> None:
        self.given_up = error

    def count_written(self) -> int:
        return self.written_bytes

    def count_kept(self) -> int:
        return self.kept_bytes

    async def writable(self) -> None: ...

    def take(self, nbytes: int) -> None:
        self.kept_bytes -= nbytes
        self.on_taken()


class Admission:
    held_bytes = 0


def account() -> PeerMemory:
    admission: Any = Admission()
    return PeerMemory(admission, {}, lambda: 0, 8 * PART)


def backlog_of(
    link: Any, budget: OutboundBudget, memory: PeerMemory | None = None
) -> Backlog:
    return Backlog(link, budget, memory or account())


def pressed(budget: OutboundBudget | None = None) -> tuple[Connection, Backlog]:
    connection = Connection()
    backlog = backlog_of(connection, budget or OutboundBudget(LIMIT))
    connection.kept_bytes = PART + 1
    backlog.on_large("big")
    return connection, backlog


async def test_peer_that_reads_its_answers_delays_nothing() -> None:
    connection = Connection()
    backlog = backlog_of(connection, OutboundBudget(LIMIT))
    connection.kept_bytes = PART
    backlog.on_large("big")
    assert not backlog.must_wait("big")
    assert connection.on_taken is nobody_waits
    await backlog.room()


async def test_requests_with_large_answers_wait_before_others() -> None:
    connection, backlog = pressed()
    assert backlog.must_wait("big")
    assert not backlog.must_wait("small")
    connection.kept_bytes = 2 * PART + 1
    backlog.look()
    assert backlog.must_wait("small")
    connection.take(PART + 1)
    assert not backlog.must_wait("big")


async def test_waiting_requests_begin_one_at_a_time() -> None:
    connection, backlog = pressed()
    begun: list[int] = []

    def begin(number: int) -> None:
        begun.append(number)
        connection.kept_bytes += PART + 1  # its answer

    for number in range(3):
        backlog.hold(lambda number=number: begin(number))  # type: ignore[misc]
    for number in range(3):
        assert begun == list(range(number))
        connection.take(PART + 1)
        await asyncio.sleep(0)
    assert begun == [0, 1, 2]


async def test_stream_item_waits_for_its_turn_or_the_loss_of_the_peer() -> None:
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


async def test_waiting_calls_do_not_begin_once_their_peer_is_lost() -> None:
    _connection, backlog = pressed()
    begun: list[int] = []
    for number in range(3):
        backlog.hold(lambda number=number: begun.append(number))  # type: ignore[misc]
    backlog.close()
    await asyncio.sleep(0)
    assert begun == []


async def test_unread_answers_count_for_the_peer() -> None:
    connection = Connection()
    memory = account()
    backlog = backlog_of(connection, OutboundBudget(LIMIT), memory)
    connection.kept_bytes = 2 * PART
    backlog.look()
    assert memory.kept_bytes == PART
    assert memory.is_watched
    connection.take(2 * PART)
    assert memory.kept_bytes == 0
    assert not memory.is_watched


async def test_small_unread_answers_count_too() -> None:
    connection = Connection()
    backlog = backlog_of(connection, OutboundBudget(LIMIT))
    connection.kept_bytes = PART + 1
    connection.on_kept()
    assert backlog.is_pressed


async def test_peer_that_asks_without_reading_is_given_up() -> None:
    connection = Connection()
    backlog_of(connection, OutboundBudget(LIMIT))
    connection.written_bytes = GIVEN_UP
    connection.on_kept()
    assert connection.given_up is None
    connection.written_bytes += 1
    connection.on_kept()
    assert isinstance(connection.given_up, MalformedError)


async def test_bytes_in_a_full_transport_are_counted() -> None:
    connection = Connection()
    memory = account()
    backlog = backlog_of(connection, OutboundBudget(LIMIT), memory)
    connection.room.clear()
    connection.on_kept()
    assert backlog.is_full
    assert memory.is_watched
    connection.written_bytes = GIVEN_UP + 1
    connection.on_kept()
    assert connection.given_up is not None
    connection.room.set()
    backlog.look()
    assert not memory.is_watched


async def test_unread_answers_of_all_peers_have_a_limit() -> None:
    budget = OutboundBudget(LIMIT)
    others = [pressed(budget) for _ in range(PEERS)]
    connection = Connection()
    backlog = backlog_of(connection, budget)
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
