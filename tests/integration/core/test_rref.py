"""A reference stands for a value elsewhere, wherever it goes, until nobody holds it."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Options, RRef, UsageError, Worker, WorkerLostError
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.errors import EncodeError
from asyncrpc.testing import acting_as
from tests.integration.core import failures, remote
from tests.integration.core.conftest import Trio
from tests.integration.core.groups import processes
from tests.integration.core.remote import Counter
from tests.integration.core.rref_parts import NOTHING, all_freed, counts


@pytest.fixture
async def trio(trio: Trio) -> AsyncIterator[Trio]:
    """Three workers that own and hold nothing once the test has ended."""
    yield trio
    await all_freed(*trio)


@pytest.fixture
async def wired(wired: Trio) -> AsyncIterator[Trio]:
    """Three workers that own and hold nothing once the test has ended."""
    yield wired
    await all_freed(*wired)


async def test_reference_shows_owner_and_state(wired: Trio) -> None:
    a, _, _ = wired
    rref = a.peer("b").remote(Counter, 5)
    assert (rref.owner_name(), rref.owner().id, rref.is_owner()) == ("b", 1, False)
    assert (await rref.to_here()).count == 5
    assert rref.confirmed_by_owner()
    assert "UserRRef" in repr(rref)
    with pytest.raises(UsageError, match="to_here"):
        rref.local_value()
    with acting_as(a):
        own = RRef(Counter(1))
    assert own.is_owner()
    assert own.local_value() is await own
    assert "OwnerRRef" in repr(own)


async def test_thread_waits_for_an_unfinished_value(wired: Trio) -> None:
    a, b, c = wired
    watch = remote.watches["made"] = remote.Watch()
    rref = a.peer("b").remote(remote.pass_gate, "made")
    taken = asyncio.ensure_future(a.peer("b").call(remote.local_value_of, rref))
    await watch.begun.wait()
    watch.gate.set()
    assert await taken == "through"
    del rref, taken
    await all_freed(a, b, c)
    del remote.watches["made"]


async def test_the_loop_never_waits_for_a_local_value(wired: Trio) -> None:
    a, *_ = wired
    watch = remote.watches["here"] = remote.Watch()
    rref = a.peer("a").remote(remote.pass_gate, "here")
    await watch.begun.wait()
    with pytest.raises(UsageError, match=r"stop the event loop; `await rref\.to_here"):
        rref.local_value()
    watch.gate.set()
    assert await rref == "through"
    del remote.watches["here"]


async def test_the_proxies_run_methods_on_the_owner(wired: Trio) -> None:
    a, _, _ = wired
    rref = a.peer("b").remote(Counter)
    assert await rref.rpc_async().add(2) == 2
    assert await rref.rpc_async().add_async(by=3) == 5
    assert await rref.rpc_async()(1) == 6
    result = rref.remote().add(10)
    assert result.owner_name() == "b"
    assert await result == 16
    assert await a.peer("c").call(remote.add_through, rref, 4) == 20
    with pytest.raises(ValueError, match="the counter fails"):
        await rref.rpc_async().fail()
    with pytest.raises(AttributeError, match="nothing_such"):
        await rref.rpc_async().nothing_such()


async def test_a_method_is_one_request_and_one_response(a: Worker, b: Worker) -> None:
    rref = a.peer("b").remote(Counter)
    await rref.to_here()
    seen: list[int] = []
    for worker, name in ((a, "b"), (b, "a")):
        link = worker.parts.directory.find(name).link
        assert link is not None
        handle = link.on_message

        def note(kind: int, *rest: Any, handle: Any = handle) -> None:
            seen.append(kind)
            handle(kind, *rest)

        reader: Any = link.connection._reader  # noqa: SLF001  (to count messages)
        reader.sink.on_message = note
    assert await rref.rpc_async().add() == 1
    assert seen == [FrameKind.REQUEST, FrameKind.RESPONSE]


async def test_references_travel_in_every_direction(wired: Trio) -> None:
    a, _, _ = wired
    rref = a.peer("b").remote(Counter, 7)
    # to its owner, to a third worker, in containers, and back as a result
    assert await a.peer("b").call(remote.value_of, rref) == 7
    assert await a.peer("c").call(remote.value_of, rref) == 7
    assert await a.peer("c").call(remote.value_of_first, {"it": [(rref,)]}) == 7
    back = await a.peer("c").call(remote.echo, rref)
    assert back.owner_name() == "b"
    assert (await back.to_here()).count == 7
    mine: Any = await a.peer("b").call(remote.make_reference, 9)
    assert (mine.owner_name(), (await mine).count) == ("b", 9)
    with acting_as(a):
        own = RRef(Counter(3))
    assert await a.peer("b").call(remote.value_of, own) == 3
    home = await a.peer("c").call(remote.echo, own)
    assert home.is_owner()
    assert home.local_value() is own.local_value()


async def test_reference_kept_by_a_callee_outlives_the_callers(wired: Trio) -> None:
    a, b, _ = wired
    rref = a.peer("b").remote(Counter, 4)
    await a.peer("c").call(remote.keep, rref)
    del rref
    gc.collect()
    await a.peer("b").call(remote.add, 1)
    assert counts(b)["owned"] == 1
    assert await a.peer("c").call(remote.value_of_kept) == 4
    await a.peer("c").call(remote.let_go)


async def test_reference_may_be_passed_on_before_its_value_exists(a: Worker) -> None:
    rref = a.peer("b").remote(remote.slow_counter)
    assert await a.peer("c").call(remote.value_of, rref) == 1


async def test_failed_construction_raises_for_every_holder(a: Worker) -> None:
    rref = a.peer("b").remote(failures.two_arguments)
    for ask in (rref.to_here, rref.rpc_async().get):
        with pytest.raises(failures.TwoArgumentsError):
            await ask()
    with pytest.raises(failures.TwoArgumentsError):
        await a.peer("c").call(remote.value_of, rref)
    with pytest.raises(failures.TwoArgumentsError):
        await a.peer("b").call(remote.value_of, rref)


async def test_unused_values_are_freed(a: Worker) -> None:
    for _ in range(50):
        a.peer("b").remote(Counter)
        a.peer("a").remote(Counter)


async def test_reference_to_the_own_worker_works(a: Worker) -> None:
    rref = a.peer("a").remote(Counter, 2)
    assert (await rref.to_here()).count == 2
    assert await rref.rpc_async().add() == 3
    assert rref.is_owner()
    assert await a.peer("a").call(remote.value_of, rref) == 3


async def test_reference_to_an_unreachable_owner_is_freed(tmp_path: Path) -> None:
    """The error that both calls end with keeps neither of them, nor the reference."""
    where = {name: f"uds://{tmp_path}/{name}" for name in ("a", "nobody")}
    options = Options(network=asyncrpc.NetworkOptions(listen=(where["a"],)))
    async with Worker("a", rendezvous=where, options=options) as a:

        async def use() -> None:
            rref = a.peer("nobody").remote(Counter)
            with pytest.raises(WorkerLostError):
                await rref.rpc_async().add(1)

        await use()
        await all_freed(a)


async def test_reference_cannot_be_pickled(trio: Trio) -> None:
    import pickle  # noqa: PLC0415

    with acting_as(trio[0]):
        rref = RRef(1)
    with pytest.raises(UsageError, match="cannot be pickled"):
        pickle.dumps(rref)


async def test_reference_is_not_blamed_for_an_unsendable_neighbour(a: Worker) -> None:
    rref = a.peer("b").remote(Counter, 1)
    deep: list[Any] = []
    for _ in range(3000):
        deep = [deep]
    with pytest.raises(EncodeError, match=r"kwargs\['deep'\]"):
        await a.peer("b").call(dict, [("rref", rref)], deep=deep)


async def test_tensor_is_used_by_reference(wired: Trio) -> None:
    a, _, _ = wired
    rref = a.peer("b").remote(torch.ones, 300, 300)
    assert torch.equal(await rref.to_here(), torch.ones(300, 300))
    total = rref.remote().sum()
    assert await total == 90_000


async def test_concurrent_forks_are_all_counted_down(a: Worker) -> None:
    rref = a.peer("b").remote(Counter)
    calls = [
        a.peer(to).call(remote.forward, [via], remote.add_through, rref, 1)
        for _ in range(20)
        for to, via in (("b", "c"), ("c", "a"), ("c", "b"), ("a", "c"))
    ]
    assert sorted(await asyncio.gather(*calls)) == list(range(1, 81))


async def test_references_cross_processes() -> None:
    async with processes("b", "c") as a:
        rref = a.peer("b").remote(Counter, 1)
        assert await a.peer("c").call(remote.add_through, rref, 2) == 3
        assert (await rref).count == 3
        del rref
        await all_freed(a)
        async with asyncio.timeout(30):
            while await a.peer("b").call(remote.counts) != NOTHING:  # noqa: ASYNC110  (nothing tells)
                await asyncio.sleep(0.01)
