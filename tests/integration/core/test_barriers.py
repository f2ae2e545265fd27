"""Wrong messages of rounds are dropped, and series that are forgotten go on."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

import asyncrpc
from asyncrpc import Worker
from asyncrpc.core.barriers.machine import table
from asyncrpc.core.barriers.messages import Key, Purpose, Replicas
from asyncrpc.testing import Cluster
from tests import raw_messages
from tests.inner_state import series_of


async def settled(
    workers: Sequence[Worker], tag: str, replicas: Replicas = None
) -> None:
    """See that the next round of a tag is passed."""
    key = Key(Purpose.RENDEZVOUS, tag, replicas)
    calls = (worker.parts.barriers.participant(key).come(60.0) for worker in workers)
    await asyncio.gather(*calls)


async def test_forgotten_series_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "SERIES_MAX", 2)
    async with Cluster(3) as workers:
        for number in range(10):
            await settled(workers, f"tag {number % 4}")
            await settled(workers[:2], f"pair {number}", (0, 1))
        for worker in workers:
            assert len(series_of(worker.parts.barriers.table)) <= 3


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("arrivals", ["RENDEZVOUS", "tag"]),
        ("arrivals", ["NOTHING", "tag", None, 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "x" * 1025, None, 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "tag", [0, 1, 1], 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "tag", [0, 1, 9], 0, -1, True, 0, b""]),
        ("arrivals", ["RENDEZVOUS", "tag", [1, 2], 0, -1, True, 0, b""]),  # not to us
        ("arrivals", ["RENDEZVOUS", "tag", [0, 2], 0, -1, True, 0, b""]),  # not by it
        ("arrivals", ["BARRIER", "", [2, 0, 1], 0, -1, True, 0, b""]),  # no neighbours
        ("result", ["BARRIER", "", None, 0, False]),  # not by the parent
        ("elsewhere", ["RENDEZVOUS", "tag", None, 0, 7, [[0, 1], 0]]),
        ("nothing", ["tag", None]),
    ],
)
async def test_invalid_notice_is_dropped(
    method: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """From a child to the root; the rounds that follow know nothing of it."""
    async with Cluster(3) as (a, b, c):
        link = await b.parts.link_to("a")
        raw_messages.tell(link, "rounds", method, value)
        assert await b.peer("a").call(max, 1, 2) == 2  # so the other has arrived
        assert f"notice of 'b' could not be taken: rounds.{method}" in caplog.text
        assert await b.parts.link_to("a") is link
        await settled((a, b, c), "tag")
        await asyncio.gather(*(worker.barrier(60.0) for worker in (a, b, c)))


async def test_arrivals_message_as_a_request_is_refused() -> None:
    async with Cluster(2) as (a, _):
        link = await a.parts.link_to("b")
        text = "sent a wrong message: 'rounds\\.arrivals', which"
        with pytest.raises(asyncrpc.AsyncRpcError, match=text):
            await raw_messages.request(link, "rounds", "arrivals", None)
