"""Profilers of a caller show what its callees do: processes of their own.

Each test is a scenario that worker0 plays; the others serve it.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.autograd import profiler, profiler_legacy

from asyncrpc.compat import profiling, rpc
from tests.integration.compat.playing import play

X = torch.ones(4)
PROFILERS = [profiling.legacy_profile, profiling.autograd_profile, profiling.profile]


# --- what is called ------------------------------------------------------------------


def double(x: torch.Tensor) -> torch.Tensor:
    with profiler.record_function("doubling"):
        return x * 2


def double_on(worker: str, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = rpc.rpc_sync(worker, double, (x,))
    return result + 1


@rpc.functions.async_execution
def double_later_on(worker: str, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    return rpc.rpc_async(worker, double, (x,)).then(lambda done: done.wait() + 1)


may_end = asyncio.Event()  # at the callee


async def wait_and_double(x: torch.Tensor) -> torch.Tensor:
    await may_end.wait()
    return double(x)


async def let_it_end() -> None:
    may_end.set()


async def double_in_steps(x: torch.Tensor) -> torch.Tensor:
    result = x * 2
    await asyncio.sleep(0)
    return result - 1


def fail(x: torch.Tensor) -> None:
    raise KeyError(str((x * 2).sum().item()))


def is_profiled() -> bool:
    return bool(torch._C._autograd._profiler_enabled())  # noqa: SLF001


class Doubler:
    def double(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @rpc.functions.async_execution
    def double_later(self, x: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        return rpc.rpc_async("worker0", double, (x,))


def wait_for(rref: rpc.RRef[Any]) -> None:
    """Wait until all that `remote` brings is there."""
    rref._get_profiling_future().wait()  # noqa: SLF001


def events_of(ended: Any) -> list[Any]:
    events = ended.events() if hasattr(ended, "events") else ended.function_events
    return list(events)


def remote_of(ended: Any) -> list[Any]:
    return [event for event in events_of(ended) if event.is_remote]


def names_of(ended: Any) -> list[str]:
    return [event.name for event in remote_of(ended)]


def parents_of(event: Any) -> Iterator[str]:
    while event.cpu_parent is not None:
        event = event.cpu_parent
        yield event.name


# --- what comes back -----------------------------------------------------------------


def gather_each_kind(make: Callable[..., Any]) -> None:
    with make(record_shapes=True, profile_memory=True) as ended:
        assert rpc.rpc_sync("worker1", double, (X,)).tolist() == [2] * 4
        assert rpc.rpc_async("worker1", torch.add, (X, 1)).wait().tolist() == [2] * 4
        rref = rpc.remote("worker1", double, (X,))
        assert rref.to_here().tolist() == [2] * 4
        wait_for(rref)
    events = {event.name: event for event in events_of(ended)}
    for call, inner in (
        ("rpc_sync#double(worker0 -> worker1)", "doubling"),
        ("rpc_async#aten::add(worker0 -> worker1)", "aten::add"),
        ("rpc_remote#double(worker0 -> worker1)", "doubling"),
    ):
        own, theirs = events[call], events[f"{call}#remote_op: {inner}"]
        assert (own.node_id, own.is_remote) == (0, False)
        assert (theirs.node_id, theirs.is_remote) == (1, True)
        assert own.time_range.start <= theirs.time_range.start, call
        assert theirs.time_range.end <= own.time_range.end, call
    call = "rpc_sync#double(worker0 -> worker1)#remote_op: "
    product = events[f"{call}aten::mul"]
    assert list(parents_of(product)) == [f"{call}doubling"]
    assert product.input_shapes[0] == [4]
    assert product.cpu_memory_usage == X.nbytes
    assert f"{call}aten::mul" in {
        key_average.key for key_average in ended.key_averages()
    }


@pytest.mark.parametrize("make", PROFILERS, ids=["legacy", "autograd", "torch"])
def test_profile_has_the_events_of_each_kind_of_call(make: Callable[..., Any]) -> None:
    play(gather_each_kind, make)


def gather_nested() -> None:
    for function in (double_on, double_later_on):
        with profiling.legacy_profile() as ended:
            result = rpc.rpc_sync("worker1", function, ("worker2", X))
        assert result.tolist() == [3] * 4
        outer = f"rpc_sync#{function.__name__}(worker0 -> worker1)#remote_op: "
        how = "sync" if function is double_on else "async"
        inner = f"{outer}rpc_{how}#double(worker1 -> worker2)"
        ranks = {event.name: event.node_id for event in remote_of(ended)}
        assert ranks[inner] == 1
        assert ranks[f"{inner}#remote_op: doubling"] == 2
        assert ranks[f"{inner}#remote_op: aten::mul"] == 2
        assert names_of(ended).count(inner) == 1


def test_nested_calls_are_part_of_the_profile() -> None:
    """A nested call may end after its thread has gone on."""
    play(gather_nested, nprocs=3)


def gather_steps() -> None:
    with profiling.legacy_profile() as ended:
        futures = [rpc.rpc_async("worker1", double_in_steps, (X,)) for _ in range(3)]
        assert [future.wait().tolist() for future in futures] == [[1] * 4] * 3
    key = "rpc_async#double_in_steps(worker0 -> worker1)#remote_op: "
    names = names_of(ended)
    assert [names.count(f"{key}aten::{operation}") for operation in ("mul", "sub")] == [
        3,
        3,
    ]


def test_profile_of_a_coroutine_has_its_own_steps_only() -> None:
    play(gather_steps)


def gather_methods() -> None:
    doubler = rpc.remote("worker1", Doubler)
    with profiling.legacy_profile() as ended:
        assert doubler.rpc_sync().double(X).tolist() == [2] * 4
        assert doubler.rpc_async().double_later(X).wait().tolist() == [2] * 4
        rref = doubler.remote().double(X)
        wait_for(rref)
    assert rref.to_here().tolist() == [2] * 4
    names = names_of(ended)
    place = "(worker0 -> worker1)#remote_op: "
    assert f"rpc_sync#_local_invoke{place}aten::mul" in names
    assert f"rpc_remote#_local_invoke{place}aten::mul" in names
    nested = "rpc_async#double(worker1 -> worker0)#remote_op: doubling"
    assert f"rpc_async#_local_invoke_async_execution{place}{nested}" in names


def test_methods_of_references_are_shown_as_torch_shows_them() -> None:
    play(gather_methods)


FAILING: list[Callable[[], Any]] = [
    lambda: rpc.rpc_sync("worker1", fail, (X,)),
    lambda: rpc.rpc_async("worker1", fail, (X,)).wait(),
    lambda: rpc.rpc_sync("worker1", int, ("x",)),
    lambda: rpc.rpc_async("worker1", int, ("x",)).wait(),
    lambda: rpc.rpc_sync("worker1", torch.mm, (X, X)),
    lambda: rpc.rpc_async("worker1", torch.mm, (X, 1)).wait(),
]


def make_and_fail() -> None:
    rpc.remote("worker1", fail, (X,)).to_here()


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001  (every one is looked at)
        return f"{type(error)} {error}"
    raise AssertionError("it did not fail")


def fail_profiled() -> None:
    plain = [error_of(call) for call in FAILING]
    for make in PROFILERS:
        with make() as ended:
            assert [error_of(call) for call in FAILING] == plain
            message = error_of(make_and_fail)
        assert names_of(ended) == []
        assert message.startswith("<class 'KeyError'>")
        assert "On WorkerInfo(id=1, name=worker1)" in message


def test_failed_call_brings_no_events() -> None:
    play(fail_profiled)


def gather_in_cycles() -> None:
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=1, repeat=2)
    cycles: list[list[str]] = []
    with profiling.profile(
        schedule=schedule, on_trace_ready=lambda ended: cycles.append(names_of(ended))
    ) as accumulating:
        for number in range(6):
            rpc.rpc_sync("worker1", (torch.neg, torch.exp)[number > 2], (X,))
            accumulating.step()
    key = "rpc_sync#aten::{0}(worker0 -> worker1)#remote_op: aten::{0}".format
    assert [set(names) for names in cycles] == [{key("neg")}, {key("exp")}]
    with profiling.profile(schedule=schedule, acc_events=True) as accumulating:
        for number in range(6):
            rpc.rpc_sync("worker1", (torch.neg, torch.exp)[number > 2], (X,))
            accumulating.step()
    assert set(names_of(accumulating)) == {key("exp"), key("neg")}


def test_profiler_cycles_are_separate_and_accumulate() -> None:
    play(gather_in_cycles)


def ask_for_nothing() -> None:
    for make in (profiler_legacy.profile, torch.profiler.profile):
        with make() as ended:
            rpc.rpc_sync("worker1", double, (X,))
            with pytest.raises(ValueError, match="invalid literal"):
                rpc.rpc_async("worker1", int, ("x",)).wait()
            assert not rpc.rpc_sync("worker1", is_profiled)
            rref = rpc.remote("worker1", double, (X,))
        events = events_of(ended)
        assert "rpc_sync#double(worker0 -> worker1)" in {event.name for event in events}
        assert [event for event in events if event.is_remote] == []
        with pytest.raises(RuntimeError, match="has not been set"):
            wait_for(rref)
    with profiling.profile() as ended:
        assert rpc.rpc_sync("worker1", is_profiled)
        late = rpc.rpc_async("worker1", wait_and_double, (X,))
    rpc.rpc_sync("worker1", let_it_end)
    late.wait()
    assert not any("wait_and_double" in name for name in names_of(ended))
    assert not rpc.rpc_sync("worker1", is_profiled)


def test_callee_is_profiled_on_request_only() -> None:
    play(ask_for_nothing)


def test_profile_without_calls_equals_torchs() -> None:
    with profiling.legacy_profile(record_shapes=True) as ended:
        double(X)
    (outer,) = (event for event in events_of(ended) if event.name == "doubling")
    assert [event.name for event in outer.cpu_children] == ["aten::mul"]
    assert {event.node_id for event in events_of(ended)} == {-1}
    with profiling.legacy_profile(enabled=False):
        assert not is_profiled()


INSTALLED = """
import asyncrpc.compat
from torch.autograd import profiler_legacy
torchs = profiler_legacy.profile
asyncrpc.compat.install()
assert profiler_legacy.profile.__module__ == "asyncrpc.compat.profiling"
assert issubclass(profiler_legacy.profile, torchs)
asyncrpc.compat.uninstall()
assert profiler_legacy.profile is torchs
"""


def test_install_replaces_torchs_profiler_until_uninstall() -> None:
    subprocess.run([sys.executable, "-c", INSTALLED], check=True, timeout=600)
