"""What torch keeps per thread or process: in subtasks, steps, kernels, generators.

See the table in docs/explanation/torch-modes.md; `test_modes_apart` has the calls.
"""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc import RRef, Worker, autograd
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from tests.numerics.test_modes_apart import (
    DEFAULT,
    KEPT,
    MODES,
    PROCESS_WIDE,
    VALUES,
    Mode,
    a,
    check_calls,
    each_mode,
    hold_mode,
    is_plain,
    state,
    waiting,
)

__all__ = ["a"]  # the fixture

LIMIT_S: Final = 60.0  # what waits waits for events; only a hang reaches it
_LIBRARY: Any = torch.library.Library
weight = nn.Parameter(torch.ones(3))


async def has_defaults_in_a_task() -> bool:
    return state() == DEFAULT


async def makes_tasks(name: str) -> list[bool]:
    """Start subtasks under a mode, which is held while they run."""
    with MODES[name]():
        plain = asyncio.create_task(has_defaults_in_a_task())
        (gathered,) = await asyncio.gather(has_defaults_in_a_task())
        async with asyncio.TaskGroup() as group:
            grouped = group.create_task(has_defaults_in_a_task())
        return [await plain, gathered, grouped.result()]


@each_mode
async def test_subtasks_of_a_served_coroutine_begin_with_the_defaults(
    name: str, a: Worker
) -> None:
    assert await a.peer("b").call(makes_tasks, name) == [True] * 3


@pytest.mark.parametrize("name", ["no_grad", "inference_mode", "autocast"])
async def test_subtasks_of_a_call_under_a_mode_begin_with_the_defaults(
    name: str, a: Worker
) -> None:
    with MODES[name]():
        call = a.peer("b").call(makes_tasks, "saved-tensor hooks")
    assert await call == [True] * 3


# --- passes, and steps of optimizers -------------------------------------------------


@contextmanager
def set_within(
    set_it: Callable[[], Any], unset: Callable[[], Any], get: Callable[[], Any]
) -> Iterator[Any]:
    """Have a state of the process; see `PROCESS_WIDE`."""
    set_it()
    try:
        yield get()
    finally:
        unset()


def weight_reference() -> Any:
    return RRef(weight)


def weighed(x: torch.Tensor) -> torch.Tensor:
    return (x * weight).sum()


@each_mode
async def test_steps_run_under_the_defaults(name: str, a: Worker) -> None:
    """First in a thread, then on the loop, and not in the mode that is held there."""
    with torch.no_grad():
        weight.fill_(1.0)
    with acting_as(a):
        reference = await asyncrpc.rpc_async("b", weight_reference)
        optimizer = await DistributedOptimizer(
            torch.optim.Adam, [reference], lr=0.1, foreach=False
        )
        async with waiting(name, lambda: a.peer("b").call(hold_mode, name)):
            for _ in range(6):
                async with autograd.context() as ctx:
                    loss = await asyncrpc.rpc_async("b", weighed, (torch.ones(3),))
                    await autograd.backward(ctx, loss)
                    await optimizer.step(ctx)
        kept = (await optimizer.state_dict())["state"][0]["exp_avg"]
    assert weight.tolist() == pytest.approx([0.4] * 3)
    assert (type(kept), kept.dtype, kept.is_inference()) == (
        torch.Tensor,
        torch.float32,
        False,
    )


HOLDS: Final[dict[str, Mode]] = {
    **MODES,
    **{name: partial(set_within, *state) for name, state in PROCESS_WIDE.items()},
}


@pytest.mark.filterwarnings("ignore:Anomaly")
@pytest.mark.parametrize("name", HOLDS)
async def test_a_pass_and_a_step_begun_under_a_mode_have_the_defaults(
    name: str, a: Worker
) -> None:
    """The first in threads, the last on the loop."""
    with torch.no_grad():
        weight.fill_(1.0)
    x = torch.ones(3, requires_grad=True)
    with acting_as(a):
        reference = await asyncrpc.rpc_async("b", weight_reference)
        optimizer = await DistributedOptimizer(torch.optim.SGD, [reference], lr=0.1)
        for _ in range(6):
            async with autograd.context() as ctx:
                loss = await asyncrpc.rpc_async("b", weighed, (x,))
                values = weight.detach().clone()
                with HOLDS[name]():
                    under = state()
                    await autograd.backward(ctx, loss)
                    await optimizer.step(ctx, clip_grad_norm=100.0)
                    assert state() == under
                gradient = autograd.get_gradients(ctx)[x]
                assert is_plain(gradient, values)
                assert gradient.dtype == torch.float32
    assert weight.tolist() == pytest.approx([0.4] * 3)


# --- kernels of the program's own ----------------------------------------------------


class Kernel:
    """What a kernel does, and where it ran."""

    has_begun, may_go = threading.Event(), threading.Event()
    threads: Final = list[str]()


def kernel(x: torch.Tensor) -> torch.Tensor:
    """Wait for another call of the same worker."""
    Kernel.threads.append(threading.current_thread().name)
    Kernel.has_begun.set()
    assert Kernel.may_go.wait(LIMIT_S)
    return torch.full_like(x, 0.5)


@contextmanager
def replaced(name: str) -> Iterator[None]:
    library: Any = _LIBRARY("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own kernel is replaced
        library.impl(name, kernel, "CPU")
    try:
        yield
    finally:
        library._destroy()  # noqa: SLF001


async def let_go() -> bool:
    Kernel.may_go.set()
    return True


async def test_a_kernel_of_the_program_runs_in_a_thread(a: Worker) -> None:
    """It may wait for a call of the same worker, from the first call on."""
    peer, x = a.peer("b"), torch.zeros(2)
    assert (await peer.call(torch.sin, x)).tolist() == [0.0, 0.0]
    Kernel.has_begun.clear()
    Kernel.may_go.clear()
    with replaced("sin"):
        call = asyncio.ensure_future(peer.call(torch.sin, x))
        assert await asyncio.to_thread(Kernel.has_begun.wait, LIMIT_S)
        assert await peer.call(let_go)
        assert (await call).tolist() == [0.5, 0.5]
        assert Kernel.threads.pop().startswith("asyncrpc-b-")
    assert (await peer.call(torch.sin, x)).tolist() == [0.0, 0.0]
    assert not Kernel.threads


# --- the number of threads, and chance -----------------------------------------------


def threads_here() -> tuple[int, int]:
    return threading.get_ident(), torch.get_num_threads()


async def threads_of_loop() -> int:
    return torch.get_num_threads()


def set_threads(count: int) -> tuple[int, int]:
    torch.set_num_threads(count)
    return threads_here()


async def set_threads_of_loop(count: int) -> None:
    torch.set_num_threads(count)


async def test_number_of_threads_is_set_per_thread(a: Worker) -> None:
    peer, before = a.peer("b"), torch.get_num_threads()
    try:
        ident, there = await peer.call(threads_here)
        await peer.call(set_threads_of_loop, there + 2)
        assert await peer.call(threads_of_loop) == torch.get_num_threads() == there + 2
        again = await peer.call(threads_here)
        assert again == (ident, there) or again[0] != ident
        changed, _ = await peer.call(set_threads, there + 1)
        assert torch.get_num_threads() == there + 2
        again = await peer.call(threads_here)
        assert again == (changed, there + 1) or again[0] != changed
        await check_calls(a)
        assert torch.get_num_threads() == there + 2  # and nothing of it is undone
    finally:
        torch.set_num_threads(before)


async def test_asyncrpc_draws_no_random_numbers(a: Worker) -> None:
    """Not to send, nor to receive, nor in a pass; generators go on where they were."""
    torch.manual_seed(7)
    drawn = torch.rand(3)
    torch.manual_seed(7)
    for make in VALUES.values():
        for function in KEPT:
            await a.peer("b").call(function, [make(), {"x": make()}])
    x = torch.ones(3, requires_grad=True)
    with acting_as(a):
        async with autograd.context() as ctx:
            await autograd.backward(ctx, await a.peer("b").call(weighed, x))
    assert torch.equal(torch.rand(3), drawn)
