"""What references cost, in messages between real workers.

PyTorch takes four for a share between two users, kept or not: FORK_REQUEST, ACK,
CHILD_ACCEPT, ACK.  Two for one that goes to its owner, and two to give one back.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter as Tally
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest
import torch

from asyncrpc import RRef, Worker
from asyncrpc.core.rref.notices import BATCH_MAX
from asyncrpc.core.services.ports import PeerLink
from asyncrpc.testing import acting_as
from tests.inner_state import routes_of
from tests.integration.core import rref_parts as parts
from tests.integration.core.conftest import Trio
from tests.integration.core.rref_parts import Counter, all_freed, counts, until

TORCH = 4


@pytest.fixture
async def trio(trio: Trio) -> AsyncIterator[Trio]:
    """Three workers that own and hold nothing once the test has ended."""
    yield trio
    parts.kept.clear()
    await all_freed(*trio)


def messages_to(worker: Worker) -> Tally[tuple[str, str]]:
    """Count from now on what a worker is told about references, by whom and what."""
    seen: Tally[tuple[str, str]] = Tally()
    for route in routes_of(worker.parts.router, "rref"):
        route.handle = partial(count, seen, route.method, route.handle)
    return seen


def count(
    seen: Tally[tuple[str, str]],
    method: str,
    take: Callable[..., None],
    link: PeerLink,
    value: Any,
) -> None:
    seen[link.peer.name, method] += 1
    take(link, value)


async def confirmed_reference(trio: Trio) -> RRef[Counter]:
    """Return a confirmed reference of a to a value of b; all are connected."""
    a, b, _ = trio
    rref: RRef[Counter] = a.peer("b").remote(Counter, 1)
    await rref
    await a.peer("c").call(asyncio.sleep, 0)
    await b.peer("c").call(asyncio.sleep, 0)
    return rref


async def test_owner_to_user_costs_the_release_only(trio: Trio) -> None:
    a, b, c = trio
    await a.peer("b").call(asyncio.sleep, 0)
    seen = [messages_to(worker) for worker in trio]
    mine = await a.peer("b").call(parts.make, 1)
    with acting_as(a):
        theirs = RRef(Counter())
    await a.peer("b").call(parts.look, theirs)
    await until(lambda: counts(a)["owned"] == 1)
    del mine, theirs
    await all_freed(a, b, c)
    assert seen == [{("b", "release"): 1}, {("a", "release"): 1}, {}]


async def test_user_to_owner_costs_nothing(trio: Trio) -> None:
    a, _, _ = trio
    rref = await confirmed_reference(trio)
    seen = [messages_to(worker) for worker in trio]
    assert await a.peer("b").call(parts.look, rref) == "b"
    await a.peer("b").call(parts.keep, rref)
    assert seen == [{}, {}, {}]
    service: Any = a.parts.references
    assert service.user.get(rref.rref_id).pins == 0  # no loan is left


async def test_user_to_owner_as_a_result_costs_one(trio: Trio) -> None:
    a, b, _ = trio
    rref = await confirmed_reference(trio)
    await a.peer("c").call(parts.keep, rref)
    await until(lambda: a.rrefs()[0].lent == 0)
    seen = [messages_to(worker) for worker in trio]
    back = await b.peer("c").call(parts.first_kept)
    assert back.is_owner()
    await until(lambda: seen[2].total() == 1)
    assert seen == [{}, {}, {("b", "returned"): 1}]


async def test_user_to_third_not_kept_costs_nothing(trio: Trio) -> None:
    a, _, _ = trio
    rref = await confirmed_reference(trio)
    seen = [messages_to(worker) for worker in trio]
    for _ in range(10):
        assert await a.peer("c").call(parts.look_async, rref) == "b"
    assert await a.peer("c").call(parts.count_of, rref) == 1
    assert seen == [{}, {}, {}]


async def test_concurrent_shares_with_a_third_send_no_owner_message(trio: Trio) -> None:
    """However calls overlap: while one runs, its loan protects those of all."""
    a, _, _ = trio
    rref = await confirmed_reference(trio)
    seen = [messages_to(worker) for worker in trio]
    calls = [a.peer("c").call(parts.count_of, rref) for _ in range(50)]
    assert await asyncio.gather(*calls) == [1] * 50
    assert seen == [{}, {}, {}]


async def test_user_to_third_kept_costs_three(trio: Trio) -> None:
    a, _, _ = trio
    rref = await confirmed_reference(trio)
    seen = [messages_to(worker) for worker in trio]
    await a.peer("c").call(parts.keep, rref)
    await until(lambda: a.rrefs()[0].lent == 0)
    notices = (("c", "returned"), ("c", "register"), ("b", "registered"))
    assert seen == [{notice: 1} for notice in notices]
    assert sum(counter.total() for counter in seen) < TORCH


async def test_releases_of_one_turn_share_a_message(trio: Trio) -> None:
    a, b, c = trio
    rrefs = await a.peer("b").call(parts.make_many, 500)
    rrefs += await a.peer("c").call(parts.make_many, 500)
    seen = [messages_to(worker) for worker in trio]
    rrefs.clear()
    await all_freed(a, b, c)
    assert seen == [{}, {("a", "release"): 1}, {("a", "release"): 1}]


async def test_releases_per_message_are_bounded(trio: Trio) -> None:
    a, b, c = trio
    rrefs = await a.peer("b").call(parts.make_many, BATCH_MAX + 10)
    seen = messages_to(b)
    rrefs.clear()
    await all_freed(a, b, c)
    assert seen == {("a", "release"): 2}


async def test_loans_of_one_turn_are_returned_in_one_message(trio: Trio) -> None:
    a, b, _ = trio
    made_here = [a.peer("b").remote(Counter) for _ in range(100)]
    await asyncio.gather(*made_here)
    await b.peer("c").call(asyncio.sleep, 0)
    await a.peer("c").call(parts.ignore, *made_here)
    seen = [messages_to(worker) for worker in trio]
    await a.peer("c").call(parts.keep_all, *made_here)
    await until(lambda: not any(rref.lent for rref in a.rrefs()))
    # The owner answers in one turn of its loop, and so the loans go back in a few.
    assert seen[0]["c", "returned"] <= 10


async def test_reference_sent_home_with_large_data_finds_its_value(trio: Trio) -> None:
    """The release may be read while a thread unpacks the message sent before it."""
    a, b, c = trio
    much = torch.zeros(1 << 20)
    for codec in ("bf16", ""):
        rrefs = [a.peer("b").remote(Counter, number) for number in range(8)]
        await asyncio.gather(*rrefs)
        peer = a.peer("b").using(codec=codec)
        calls = [
            asyncio.ensure_future(peer.call(parts.count_beside, rref, much))
            for rref in rrefs
        ]
        await asyncio.sleep(0)
        rrefs.clear()
        gc.collect()
        assert await asyncio.gather(*calls) == list(range(8))
        calls.clear()
        await all_freed(a, b, c)
