"""References in a message that nobody reads go back to whoever counts them.

Their sender counts them as arrived from the moment that it sends them.  So whoever does
not read a message, because it is refused, cannot be read, or is wanted no more, takes
the references in it and lets go: else a value would never be freed.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import (
    CallError,
    LimitOptions,
    Options,
    RejectedError,
    RemoteError,
    RRef,
    Worker,
)
from asyncrpc.errors import DecodeError
from asyncrpc.testing import Cluster, acting_as
from tests import raw_messages
from tests.integration.core.conftest import Trio
from tests.integration.core.rref_parts import Counter, all_freed, counts, until

LIMIT_S = 60.0  # for what would otherwise hang
_release: asyncio.Event


async def hold() -> None:
    await _release.wait()


def refuse_to_be_read() -> None:
    raise ValueError("it cannot be read")


class Unreadable:
    """A value whose own code raises when it is read."""

    def __reduce__(self) -> Any:
        return refuse_to_be_read, ()


def take(*_values: Any) -> None:
    """Take anything, and keep nothing."""


async def many(count: int) -> AsyncIterator[RRef[Counter]]:
    for number in range(count):
        yield RRef(Counter(number))


async def unreadable_items() -> AsyncIterator[Any]:
    yield RRef(Counter(1))
    yield [RRef(Counter(2)), Unreadable(), RRef(Counter(3))]
    yield RRef(Counter(4))


def unreadable_result(*values: Any) -> list[Any]:
    return [RRef(Counter(1)), *values, Unreadable(), RRef(Counter(2)), *values]


def raise_with(rref: RRef[Any]) -> None:
    raise ValueError("it has a reference", rref)


async def references_of(trio: Trio) -> list[RRef[Counter]]:
    """Return references of `a`: of a value of its own, of b's (home) and of c's."""
    a, _, _ = trio
    with acting_as(a):
        rrefs = [RRef(Counter(0)), a.peer("b").remote(Counter, 1)]
    rrefs.append(a.peer("c").remote(Counter, 2))
    for rref in rrefs[1:]:
        await rref
    await a.peer("b").call(take, *rrefs)
    return rrefs


ORDERS = ["first", "last", "between", "within"]


def arranged(order: str, rrefs: list[RRef[Counter]]) -> list[Any]:
    wrong = Unreadable()
    if order == "first":
        return [wrong, *rrefs]
    if order == "last":
        return [*rrefs, wrong]
    if order == "between":
        return [rrefs[0], wrong, *rrefs[1:], rrefs]
    return [{"a": [rrefs, wrong, (rrefs[1], {"b": rrefs[2]})]}]


@pytest.fixture
async def trio(trio: Trio) -> AsyncIterator[Trio]:
    """Three workers that own and hold nothing once the test has ended."""
    yield trio
    await all_freed(*trio)


@pytest.mark.parametrize("order", ORDERS)
async def test_unreadable_request_frees_its_references(trio: Trio, order: str) -> None:
    a = trio[0]
    references = await references_of(trio)
    for _ in range(3):
        with pytest.raises(CallError, match="it cannot be read"):
            await a.peer("b").call(take, *arranged(order, references))
    assert await a.peer("b").call(len, "ab") == 2


async def test_refused_request_releases_its_references() -> None:
    global _release  # noqa: PLW0603  (of this test's loop)
    _release = asyncio.Event()
    options = Options(drain_timeout_s=2.0, limits=LimitOptions(inbound_calls_max=2))
    async with Cluster(3, options=options) as (a, b, c):
        trio = a, b, c
        references = await references_of(trio)
        held = [asyncio.ensure_future(a.peer("b").call(hold)) for _ in range(2)]
        await until(lambda: b.parts.active == 2)
        for _ in range(3):
            with pytest.raises(RejectedError):
                await a.peer("b").call(take, references, {"x": references})
        _release.set()
        await asyncio.gather(*held)
        references.clear()
        await all_freed(*trio)


async def test_refused_remote_releases_its_references() -> None:
    options = Options(drain_timeout_s=2.0, limits=LimitOptions(references_max=2))
    async with Cluster(3, options=options) as (a, b, c):
        held = [a.peer("b").remote(Counter, number) for number in range(2)]
        for reference in held:
            await reference
        with acting_as(a):
            mine = RRef(Counter(5))
        for _ in range(3):
            with pytest.raises(asyncrpc.AsyncRpcError, match="references_max"):
                await a.peer("b").remote(take, mine, held)
        held.clear()
        del mine, reference
        await all_freed(a, b, c)


async def test_request_for_a_missing_function_frees_its_references(trio: Trio) -> None:
    a = trio[0]
    references = await references_of(trio)
    with pytest.raises(CallError):
        await a.peer("b").call(hidden, *references)


def hidden() -> None:
    """Be what no peer can find: see below."""


hidden.__qualname__ = "not_at_all"


async def test_unreadable_result_releases_its_references(trio: Trio) -> None:
    a = trio[0]
    references = await references_of(trio)
    for _ in range(3):
        with pytest.raises(CallError, match="it cannot be read"):
            await a.peer("b").call(unreadable_result, *references)


async def test_closed_stream_releases_items_on_their_way(a: Worker) -> None:
    for _ in range(3):
        stream = a.peer("b").stream(many, 12)
        await anext(stream)
        await stream.aclose()


async def test_item_after_the_end_of_its_stream_is_released(trio: Trio) -> None:
    a, b, _ = trio
    stream = a.peer("b").stream(held_references)
    await anext(stream)
    back = await b.parts.link_to("a")
    (serving,) = back.served
    await stream.aclose()  # its CANCEL is on the way when the next item leaves
    with acting_as(b):
        back.responder.send_item(serving, 1, RRef(Counter(1)))


async def held_references() -> AsyncIterator[RRef[Counter]]:
    yield RRef(Counter(0))
    await asyncio.Event().wait()


async def test_unreadable_item_releases_its_references(trio: Trio) -> None:
    stream = trio[0].peer("b").stream(unreadable_items)
    with pytest.raises(CallError, match="it cannot be read"):
        [_ async for _ in stream]


async def test_error_with_a_reference_keeps_its_text(trio: Trio) -> None:
    a = trio[0]
    references = await references_of(trio)
    with pytest.raises(ValueError, match="it has a reference") as caught:
        await a.peer("b").call(raise_with, references[0])
    assert isinstance(caught.value, RemoteError)


@pytest.mark.parametrize("codec", ["", "zstd"])
async def test_cancelled_large_request_releases_its_references(codec: str) -> None:
    """At every point that it may have come to; with a codec it is also in a thread."""
    options = Options(drain_timeout_s=2.0)
    async with Cluster(3, network="uds", options=options) as (a, b, c):
        trio = a, b, c
        references = await references_of(trio)
        peer = a.peer("b").using(codec=codec) if codec else a.peer("b")
        bulk = torch.zeros(2 << 20)
        for turns in range(0, 60, 3):
            call = asyncio.ensure_future(peer.call(take, bulk, *references))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
        del call
        assert await a.peer("b").call(len, "ab") == 2
        references.clear()
        await all_freed(*trio)


async def test_invalid_release_keeps_the_others_valid(a: Worker, b: Worker) -> None:
    """The releases come in one message; the valid ones count."""
    with acting_as(b):
        kept = RRef(Counter(7))
    lent: list[Any] = [await a.peer("b").call(make, number) for number in range(3)]
    link = await a.parts.link_to("b")
    service: Any = b.parts.references
    assert counts(b)["owned"] == 4
    entries = [[*rref.rref_id, 1] for rref in lent]
    wrong = [[*kept.rref_id, 1], [*lent[0].rref_id, 99], [1, 2, 3]]
    raw_messages.tell(link, "rref", "release", [[entries[0], *wrong, *entries[1:]]])
    await until(lambda: counts(b)["owned"] == 1)
    assert service.local_value(kept).count == 7
    lent.clear()  # they are released for the second time, which changes nothing
    gc.collect()
    assert await a.peer("b").call(len, "ab") == 2
    assert counts(b)["owned"] == 1


def make(number: int) -> RRef[Counter]:
    return RRef(Counter(number))


@pytest.mark.parametrize("forks", [0, -1, 2, 2**63, 0.5, True, None])
async def test_release_of_unheld_reference_is_dropped(trio: Trio, forks: Any) -> None:
    a, _, c = trio
    rref: Any = await a.peer("b").call(make, 1)
    for worker in (a, c):  # c holds nothing
        link = await worker.parts.link_to("b")
        count = 1 if worker is c else forks
        raw_messages.tell(link, "rref", "release", [[[*rref.rref_id, count]]])
        assert await worker.peer("b").call(len, "ab") == 2
    assert (await rref.to_here()).count == 1
    assert await a.parts.link_to("b") is not None


@pytest.mark.parametrize("method", ["gone", "registered"])
async def test_notices_of_a_value_come_from_its_owner(trio: Trio, method: str) -> None:
    a, _, c = trio
    rref: Any = await a.peer("b").call(make, 1)
    raw_messages.tell(await c.parts.link_to("a"), "rref", method, list(rref.rref_id))
    assert await c.peer("a").call(len, "ab") == 2
    assert (await rref.to_here()).count == 1


async def test_forged_owner_name_renames_no_worker(trio: Trio) -> None:
    """A reference names its owner; one that lies takes nobody else's references."""
    a, b, c = trio
    await a.peer("b").call(len, "ab")
    service: Any = a.parts.references
    lie = [int(c.incarnation), 9, int(b.incarnation), "nobody", 0, 0]
    service.begin_decode(await a.parts.link_to("c"))
    with pytest.raises(DecodeError):  # c is not the owner, and sends it as one
        service.lift(lie)
    service.end_decode()
    assert service.names.of(b.incarnation) == "b"
