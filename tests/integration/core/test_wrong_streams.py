"""Streams that go wrong: what the consumer is told, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrpc import CallError, DeadlineExceededError, Outcome
from tests.integration.core.conftest import Trio

LIMIT_S = 60.0  # that only a hang reaches


def explode() -> None:
    raise ValueError("while it is read")


class RaisesWhenRead:
    def __reduce__(self) -> Any:
        return explode, ()


async def streams() -> AsyncIterator[Any]:
    yield 1
    yield RaisesWhenRead()


async def waits() -> AsyncIterator[int]:
    yield 1
    await asyncio.Event().wait()


async def drain(source: AsyncIterator[Any], items: list[Any]) -> None:
    """Take items until the stream ends or raises."""
    async for item in source:
        items.append(item)  # noqa: PERF401  (those before the error count)


async def test_unreadable_item_has_the_outcome_executed(trio: Trio) -> None:
    words = r"streams on 'b': .*while it is read"
    with pytest.raises(CallError, match=words) as caught:
        await drain(trio[0].peer("b").stream(streams), [])
    assert caught.value.outcome is Outcome.EXECUTED


async def test_the_option_timeout_limits_a_stream(trio: Trio) -> None:
    items: list[Any] = []
    async with asyncio.timeout(LIMIT_S):
        with pytest.raises(DeadlineExceededError, match=r"no response in 0\.2 s"):
            await drain(trio[0].peer("b").using(timeout_s=0.2).stream(waits), items)
    assert len(items) <= 1


async def test_an_infinite_timeout_is_no_limit(trio: Trio) -> None:
    peer = trio[0].peer("b").using(timeout_s=float("inf"))
    assert await peer.call(len, "ab") == 2
    assert await peer.remote(len, "abc").to_here(timeout_s=float("inf")) == 3
    async for item in peer.stream(waits):
        assert item == 1
        break


async def test_stream_timeout_none_means_no_limit(trio: Trio) -> None:
    async for item in trio[0].peer("b").using(timeout_s=None).stream(waits):
        assert item == 1
        break
