"""Calls show in torch's profiler, named as torch names them, from start to answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

import asyncrpc
from asyncrpc import Worker
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import profiled
from tests.integration.core.groups import processes
from tests.integration.core.profiled import Gate, Trace, new_profile

X = torch.ones(3)


@pytest_asyncio.fixture
async def a() -> AsyncIterator[Worker]:
    """The current worker, one of three that are connected."""
    async with Cluster(3) as (first, *_):
        with acting_as(first):
            for name in "bc":
                await first.peer(name).call(int)
            yield first


async def test_calls_are_named_as_torch_names_them(a: Worker) -> None:
    with new_profile() as profile:
        await a.peer("b").call(profiled.add, X, 1.0)
        await asyncrpc.rpc_async("b", torch.add, (X, 1.0))
        await a.group(["b", "c"]).call(int)
        adder = a.peer("b").remote(profiled.Adder)
        await adder.rpc_async().add(1.0)
        await adder.remote().add(1.0).to_here()
        await a.peer("b").using(idempotent=True).call(profiled.add_later, X, 1.0)
    names = [name for name in Trace(profile).names() if "_run#" not in name]
    assert names == [
        "rpc_async#add(a -> b)",
        "rpc_async#add(a -> b)",
        "rpc_async#int(a -> b)",
        "rpc_async#int(a -> c)",
        "rpc_remote#Adder(a -> b)",
        "rpc_async#add(a -> b)",
        "rpc_remote#add(a -> b)",
        "rpc_async#to_here(a -> b)",
        "rpc_async#add_later(a -> b)",
    ]


async def test_range_lasts_until_the_answer(a: Worker) -> None:
    """Calls overlap on one thread, and end in another order than they began."""
    with new_profile() as profile:
        gates = {name: Gate(name) for name in ("first", "second", "third")}
        calls, before_s, after_s = {}, {}, {}
        for name, gate in gates.items():
            before_s[name] = time.perf_counter()
            calls[name] = asyncrpc.rpc_async("b", profiled.wait, (name,))
            after_s[name] = time.perf_counter()
            await gate.reached.wait()
        least_us, most_us = {}, {}
        for name in ("second", "first", "third"):
            least_us[name] = (time.perf_counter() - after_s[name]) * 1e6
            gates[name].opened.set()
            await calls[name]
            most_us[name] = (time.perf_counter() - before_s[name]) * 1e6
    trace = Trace(profile)
    for kind in ("rpc_async", "rpc_run"):
        shown = dict(zip(gates, trace.of(f"{kind}#wait(a -> b)"), strict=True))
        ends = sorted(shown, key=lambda name: shown[name].end_us)
        assert ends == ["second", "first", "third"]
    shown = dict(zip(gates, trace.of("rpc_async#wait"), strict=True))
    for name, event in shown.items():
        assert least_us[name] * 0.99 <= event.took_us <= most_us[name] * 1.01


async def test_operations_of_a_function_are_in_its_range(a: Worker) -> None:
    with new_profile() as profile:
        await a.peer("b").call(profiled.add_later, X, 1.0)
    trace = Trace(profile)
    call, function = trace.of()
    assert function.name == "rpc_run#add_later(a -> b)"
    assert call.begin_us < function.begin_us < function.end_us < call.end_us
    added = trace.named("aten::add")
    assert function.begin_us < added.begin_us < added.end_us < function.end_us


async def test_functions_of_threads_are_shown_where_they_run(a: Worker) -> None:
    """If the profiler sees all threads; else on that of the loop."""
    with new_profile() as profile:
        await a.peer("b").call(profiled.add, X, 1.0)
    call, function = Trace(profile).of()
    assert function.name == "rpc_run#add(a -> b)"
    assert function.thread == call.thread
    with new_profile(all_threads=True) as profile:
        await a.peer("b").call(profiled.add, X, 1.0)
    trace = Trace(profile)
    call, function = trace.of()
    assert function.name == "rpc_run#add(a -> b)"
    added = trace.named("aten::add")
    assert added.thread == function.thread != call.thread
    assert function.begin_us < added.begin_us < added.end_us < function.end_us


async def test_stream_is_shown_where_it_is_produced(a: Worker) -> None:
    with new_profile() as profile:
        items = [item async for item in a.peer("b").stream(profiled.count, 3)]
        assert items == [0, 1, 2]
    assert Trace(profile).names() == ["rpc_run#count(a -> b)"]


async def test_calls_that_fail_or_are_cancelled_end_their_ranges(a: Worker) -> None:
    with new_profile() as profile:
        with pytest.raises(ValueError, match="it fails"):
            await a.peer("b").call(profiled.fail)
        gate = Gate("never opened")
        call = asyncrpc.rpc_async("b", profiled.wait, ("never opened",))
        await gate.reached.wait()
        call.cancel()
        await asyncio.wait([call])
        await a.peer("b").call(int)  # which b serves after it has read the cancel
        torch.neg(X)
    trace = Trace(profile)
    after = trace.named("aten::neg")
    for name in ("fail", "wait", "int"):
        for kind in ("async", "run"):
            span = trace.named(f"rpc_{kind}#{name}(a -> b)")
            assert span.end_us < after.begin_us, span


async def test_autograd_profiler_shows_calls(a: Worker) -> None:
    with torch.autograd.profiler.profile() as profile:
        await a.peer("b").call(profiled.add, X, 1.0)
    names = {event.name for event in profile.function_events}
    assert names >= {"rpc_async#add(a -> b)", "rpc_run#add(a -> b)"}


async def test_profile_shows_calls_begun_under_it_only(a: Worker) -> None:
    gate = Gate("open before")
    before = asyncrpc.rpc_async("b", profiled.wait, ("open before",))
    await gate.reached.wait()
    with new_profile() as profile:
        gate.opened.set()
        await before
        gate = Gate("open after")
        after = asyncrpc.rpc_async("b", profiled.wait, ("open after",))
        await gate.reached.wait()
    gate.opened.set()
    await after
    assert Trace(profile).names() == ["rpc_async#wait(a -> b)", "rpc_run#wait(a -> b)"]


async def test_a_worker_may_profile_its_own_process() -> None:
    """And sees the functions that others call, while these see nothing."""
    async with processes("b") as a:
        recorder = a.peer("b").remote(profiled.Recorder)
        await recorder.rpc_async().begin()
        await a.peer("b").call(profiled.add_later, X, 1.0)
        names = await recorder.rpc_async().end()
    assert "rpc_run#add_later(a -> b)" in names
    assert not any(name.startswith("rpc_async#") for name in names)
