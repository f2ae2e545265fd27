"""A call runs its function under the modes of torch that it was made under.

And under those only: they hold in every step of a coroutine, and are nobody else's.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
import torch

import asyncrpc
from asyncrpc import Worker, autograd
from asyncrpc.core.autograd.modes import ThreadModes
from asyncrpc.errors import MalformedError
from asyncrpc.testing import Cluster, acting_as

Seen = tuple[bool, bool, str]  # gradients, inference mode, what autocast casts to


def seen() -> Seen:
    """Say what modes this thread has."""
    is_on = torch.is_autocast_enabled("cpu")
    to = str(torch.get_autocast_dtype("cpu")) if is_on else ""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), to


@asyncrpc.on_loop
def on_loop() -> Seen:
    return seen()


async def coroutine() -> Seen:
    """Say what all steps have had, if it is the same."""
    modes = [seen()]
    for _ in range(3):
        await asyncio.sleep(0)
        modes.append(seen())
    return same(modes)


@asyncrpc.functions.async_execution
def execution() -> Awaitable[Seen]:
    return coroutine()


@asyncrpc.functions.async_execution
def execution_elsewhere(to: str) -> Awaitable[Seen]:
    return asyncrpc.rpc_async(to, seen)


async def items_later(count: int) -> AsyncIterator[Seen]:
    for _ in range(count):
        await asyncio.sleep(0)
        yield seen()


def items(count: int) -> Iterator[Seen]:
    for _ in range(count):
        yield seen()


async def nested(to: str) -> Seen:
    """Say what a call of this one has, started in a later step."""
    await asyncio.sleep(0)
    modes: Seen = await asyncrpc.rpc_async(to, coroutine)
    return modes


def nested_in_thread(to: str) -> Seen:
    modes: Seen = asyncrpc.rpc_sync(to, seen)
    return modes


@asyncrpc.idempotent
def twice() -> Seen:
    return seen()


def nested_under(to: str, name: str) -> Seen:
    """Call under a mode, in a thread."""
    with torch.enable_grad(), torch.inference_mode(mode=False), MODES[name]():
        modes: Seen = asyncrpc.rpc_sync(to, seen)
    return modes


def made_in_thread(to: str) -> Any:
    """Return a reference to what a call sees that a thread has started."""
    return asyncrpc.remote(to, seen)


def without_gradients(to: str) -> Seen:
    with torch.no_grad():
        modes: Seen = asyncrpc.rpc_sync(to, seen)
    return modes


class Thing:
    """Has methods, and is called."""

    def seen(self) -> Seen:
        return seen()

    async def later(self) -> Seen:
        return await coroutine()

    def __call__(self) -> Seen:
        return seen()


async def changing() -> list[Seen]:
    """Change the modes for a while, in which others run."""
    modes = [seen()]
    with torch.enable_grad(), torch.autocast("cpu", torch.float16):
        await asyncio.sleep(0)
        modes.append(seen())
    await asyncio.sleep(0)
    modes.append(seen())
    return modes


def careless() -> Seen:
    """Leave modes changed."""
    before = seen()
    torch._C._set_grad_enabled(not before[0])  # noqa: SLF001
    return before


class Waiting:
    """Where a function stops until it is told, or cancelled.

    Attributes:
        ended: what it had at the end.
    """

    open_ones: dict[str, Waiting] = {}  # noqa: RUF012  (workers find them by name)

    def __init__(self, name: str) -> None:
        self.open_ones[name] = self
        self.begun = asyncio.Event()
        self.go_on = asyncio.Event()
        self.ended: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()


async def wait(name: str) -> Seen:
    waiting = Waiting.open_ones.pop(name)
    waiting.begun.set()
    try:
        await waiting.go_on.wait()
    finally:
        waiting.ended.set_result(seen())
    return seen()


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def product(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def same(modes: list[Seen]) -> Seen:
    assert modes, "nothing was seen"
    assert all(mode == modes[0] for mode in modes), modes
    return modes[0]


Mode = Callable[[], contextlib.AbstractContextManager[Any]]


@contextlib.contextmanager
def both() -> Iterator[None]:
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        yield


MODES: dict[str, Mode] = {
    "none": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad and autocast": both,
}


NONE: Seen = (True, False, "")
Way = Callable[[Worker], Awaitable[Seen]]


@pytest_asyncio.fixture
async def a() -> AsyncIterator[Worker]:
    """The current worker, one of three that have no connections yet."""
    casts_to = torch.get_autocast_dtype("cpu")
    async with Cluster(3) as (first, *_):
        with acting_as(first):
            yield first
    assert torch.get_autocast_dtype("cpu") == casts_to
    assert torch.is_autocast_cache_enabled()


async def by_stream(a: Worker, function: Any) -> Seen:
    return same([mode async for mode in a.peer("b").stream(function, 3)])


async def by_reference(a: Worker, method: str) -> Seen:
    """Call a method of an object that is there, by a call made under the mode."""
    thing = a.peer("b").remote(Thing)
    modes: Seen = await getattr(thing.rpc_async(), method)()
    return modes


async def by_result_of_method(a: Worker) -> Seen:
    thing = a.peer("b").remote(Thing)
    modes: Seen = await thing.remote().seen().to_here()
    return modes


async def by_reference_of_a_thread(a: Worker) -> Seen:
    result = await a.peer("b").call(made_in_thread, "c")
    modes: Seen = await result.to_here()
    return modes


async def by_group(a: Worker) -> Seen:
    return same(await a.group(["b", "c"]).call(seen))


WAYS: dict[str, Way] = {
    "a thread": lambda a: a.peer("b").call(seen),
    "the loop": lambda a: a.peer("b").call(on_loop),
    "a coroutine": lambda a: a.peer("b").call(coroutine),
    "this worker": lambda a: a.peer("a").call(coroutine),
    "async_execution": lambda a: a.peer("b").call(execution),
    "async_execution, then another": lambda a: a.peer("b").call(
        execution_elsewhere, "c"
    ),
    "an object": lambda a: a.peer("b").call(Thing()),
    "a nested call": lambda a: a.peer("b").call(nested, "c"),
    "a nested call of a thread": lambda a: a.peer("b").call(nested_in_thread, "c"),
    "an idempotent call": lambda a: a.peer("b").using(idempotent=True).call(seen),
    "a call with a codec": lambda a: a.peer("b").using(codec="bf16").call(seen),
    "a group": by_group,
    "remote": lambda a: a.peer("b").remote(seen).to_here(),
    "remote by a thread": by_reference_of_a_thread,
    "a method": lambda a: by_reference(a, "seen"),
    "a method that waits": lambda a: by_reference(a, "later"),
    "a method by remote": by_result_of_method,
    "a stream": lambda a: by_stream(a, items_later),
    "a stream of a thread": lambda a: by_stream(a, items),
}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
async def test_functions_run_under_the_modes_of_the_call(
    way: Way, mode: Mode, a: Worker
) -> None:
    with mode():
        wanted = seen()
        assert await way(a) == wanted  # on a connection that is made first
        assert await way(a) == wanted
    assert await way(a) == NONE


async def test_a_thread_may_call_under_a_mode_of_its_own(a: Worker) -> None:
    await a.peer("b").call(int)  # which connects
    result = await a.peer("b").call(without_gradients, "c")
    assert result == (False, False, "")


@pytest.mark.parametrize("name", MODES)
async def test_modes_are_those_at_the_making_of_a_call(name: str, a: Worker) -> None:
    """The first has to connect; one begins in a thread; one, anew after each loss."""
    with MODES[name]():
        wanted = seen()
        calls = [
            asyncrpc.rpc_async("b", seen),
            asyncrpc.rpc_async("b", twice),
            asyncrpc.rpc_async("b", nested_in_thread, ("c",)),
        ]
        group = a.group(["b", "c"]).call(coroutine)
    assert await asyncio.gather(*calls) == [wanted] * 3
    assert await group == [wanted] * 2
    with torch.no_grad():  # which others on this loop run under, too
        call = asyncrpc.rpc_async("b", nested_under, ("c", name))
        assert await call == wanted


async def test_waiting_call_keeps_its_modes_to_itself(a: Worker) -> None:
    """All on one loop: each step has its own, and between steps there are none."""
    waiting = {name: Waiting(name) for name in MODES}
    wanted, calls = {}, {}
    for name, mode in MODES.items():
        with mode():
            wanted[name] = seen()
            calls[name] = asyncrpc.rpc_async("b", wait, (name,))
    for step in waiting.values():
        await step.begun.wait()
        assert seen() == NONE
    assert await a.peer("b").call(coroutine) == NONE
    for name in reversed(MODES):
        waiting[name].go_on.set()
        assert await calls[name] == wanted[name]
        assert seen() == NONE


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
async def test_cancelled_call_ends_under_its_modes(mode: Mode, a: Worker) -> None:
    waiting = Waiting("one")
    with mode():
        wanted = seen()
        call = asyncrpc.rpc_async("b", wait, ("one",))
    await waiting.begun.wait()
    call.cancel()
    assert await waiting.ended == wanted
    with pytest.raises(asyncio.CancelledError):
        await call
    assert seen() == NONE


async def test_a_stream_that_is_left_early_is_closed_under_its_modes() -> None:
    closed: list[Seen] = []

    async def items() -> AsyncIterator[int]:
        try:
            while True:
                yield 1
                await asyncio.sleep(0)
        finally:
            await asyncio.sleep(0)
            closed.append(seen())

    place = ThreadModes().surround([1, {}], items)
    stream = place()
    assert await anext(stream) == 1
    await stream.aclose()
    assert closed == [(False, False, "")]


async def test_modes_changed_by_a_coroutine_are_its_own(a: Worker) -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        call = asyncrpc.rpc_async("b", changing)
    outside = (False, True, "torch.bfloat16")
    inside = (True, True, "torch.float16")
    assert await call == [outside, inside, outside]
    assert seen() == NONE
    assert torch.get_autocast_dtype("cpu") == torch.bfloat16


async def test_modes_left_by_a_function_are_reset(a: Worker) -> None:
    with torch.no_grad():
        assert await a.peer("b").call(careless) == (False, False, "")
    assert await a.peer("b").call(seen) == NONE


async def test_results_record_nothing_under_no_grad(a: Worker) -> None:
    x = torch.ones(2, requires_grad=True)
    async with autograd.context():
        assert (await a.peer("b").call(double, x)).requires_grad
        with torch.no_grad():
            silent = asyncrpc.rpc_async("b", double, (x,))
        assert not (await silent).requires_grad


async def test_values_made_in_inference_mode_are_inference_tensors(a: Worker) -> None:
    x = torch.ones(2)
    with torch.inference_mode():
        value = a.peer("b").remote(double, x)
    assert await value.rpc_async().is_inference()
    assert torch.equal(await value.to_here(), x * 2)
    assert not await a.peer("b").remote(double, x).rpc_async().is_inference()


async def test_torchs_own_functions_are_cast(a: Worker) -> None:
    x = torch.rand(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        wanted = torch.mm(x, x)
        calls = [
            asyncrpc.rpc_async("b", function, (x, x))
            for function in (torch.mm, torch.mul)
        ]
        calls.append(asyncrpc.rpc_async("b", product, (x,)))
    multiplied, elementwise, other = await asyncio.gather(*calls)
    assert multiplied.dtype == torch.bfloat16
    assert torch.equal(multiplied, wanted)
    assert torch.equal(other, wanted)
    assert elementwise.dtype == torch.float32


async def test_cached_casts_do_not_reach_another_call() -> None:
    """Autocast keeps what it has cast of parameters until it is left."""
    weight = torch.rand(4, 4, requires_grad=True)

    class Layer:
        async def run(self, x: torch.Tensor) -> torch.Tensor:
            await asyncio.sleep(0)
            return (x @ weight).detach()

    run = ThreadModes().surround([0, {"cpu": "bfloat16"}], Layer().run)
    first = await run(torch.eye(4))
    with torch.no_grad():
        weight.add_(1)
    second = await run(torch.eye(4))
    assert torch.equal(second, weight.detach().bfloat16())
    assert not torch.equal(first, second)


async def test_calls_without_modes_send_none(a: Worker) -> None:
    assert a.parts.meta_here() == {}
    with torch.no_grad():
        assert a.parts.meta_here() == {"m": [1, {}]}


def test_kinds_of_devices_that_are_unknown_are_left_out() -> None:
    run = ThreadModes().surround([2, {"abacus": "float16", "cpu": "float16"}], seen)
    assert run() == (True, True, "torch.float16")


@pytest.mark.parametrize(
    "meta", [None, 1, [], ["x", {}], [0, []], [0, {"cpu": "int3"}], [0, {"cpu": []}]]
)
def test_modes_that_cannot_be_read_are_refused(meta: Any) -> None:
    with pytest.raises(MalformedError, match="modes"):
        ThreadModes().surround(meta, seen)
