"""Contexts and passes that exist at the same time do not get into each other's way.

Nor does what is left of a pass that was cancelled, or of one that torch ran alone; and
a context that has ended is gone from every worker, whatever still runs in it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import RRef, Worker
from asyncrpc.autograd import backward, context, current_context, get_gradients
from asyncrpc.testing import acting_as
from tests.numerics.stateful_objects import (
    Gate,
    Keeper,
    Keepers,
    Program,
    all_released,
    ask,
    assert_equal,
    group_of,
    in_one_process,
    leaf,
    open_contexts,
    reports,
)

Roots = list[torch.Tensor]


async def straight(k: Keepers, x: torch.Tensor) -> Roots:
    """Nothing that a worker sends depends on what comes back to it."""
    return [await ask(k["b"], "times", x.detach())]


async def to_and_fro(k: Keepers, x: torch.Tensor) -> Roots:
    y = await ask(k["b"], "times", x)
    return [await ask(k["b"], "join", y, x)]


PROGRAMS = pytest.mark.parametrize("program", [straight, to_and_fro])


@PROGRAMS
async def test_concurrent_passes_of_a_context_add_up(program: Program) -> None:
    wanted = await in_one_process(program, "ab", passes=6)
    async with group_of(2) as (_, keepers), context() as ctx:
        x = leaf()
        roots = await program(keepers, x)
        ones = [torch.ones_like(root) for root in roots]
        run = partial(backward, ctx, roots, retain_graph=True, gradients=ones)
        await asyncio.gather(*(run() for _ in range(6)))
        assert_equal(await reports(keepers, ctx, x), wanted)


@PROGRAMS
async def test_concurrent_contexts_share_only_parameters(program: Program) -> None:
    wanted = await in_one_process(program, "ab")
    async with group_of(2) as (workers, keepers):

        async def one_context() -> Any:
            x = leaf()
            async with context() as ctx:
                roots = await program(keepers, x)
                assert await workers[0].peer("b").call(context_here) == tuple(ctx.id)
                ones = [torch.ones_like(root) for root in roots]
                await backward(ctx, roots, gradients=ones)
                return await reports(keepers, ctx, x)

        for reported in await asyncio.gather(*(one_context() for _ in range(6))):
            assert_equal(reported, wanted)
        await all_released(workers)


@PROGRAMS
async def test_plain_torch_pass_is_refused_and_does_not_count(program: Program) -> None:
    """The plain pass runs the same nodes, up to the received tensors."""
    wanted = await in_one_process(program, "ab")
    async with group_of(2) as (_, keepers), context() as ctx:
        x = leaf()
        roots = await program(keepers, x)
        ones = [torch.ones_like(root) for root in roots]
        with pytest.raises(
            asyncrpc.errors.AutogradError, match="nothing on other workers"
        ):
            torch.autograd.backward(roots, ones, retain_graph=True)
        x.grad = None
        await backward(ctx, roots, gradients=ones)
        assert_equal(await reports(keepers, ctx, x), wanted)


async def context_here() -> tuple[int, int]:
    creator, serial = current_context().id
    return creator, serial


async def test_nested_contexts_are_separate() -> None:
    wanted = await in_one_process(straight, "ab")
    async with group_of(2) as (_, keepers), context() as outer:
        x = leaf()
        (y,) = await straight(keepers, x)
        async with context() as inner:
            await backward(inner, (await to_and_fro(keepers, x))[0].sum())
        await backward(outer, y.sum())
        assert_equal(await reports(keepers, outer, x), wanted)


async def test_contexts_end_on_every_worker_that_they_reached() -> None:
    async with group_of(3) as (workers, keepers):
        async with context() as ctx:
            await ask(keepers["b"], "relay", keepers["c"], "times", leaf())
            assert [open_contexts(worker) for worker in workers] == [1, 1, 1]
        await all_released(workers)
    with pytest.raises(asyncrpc.errors.InvalidContextError, match="ended"):
        get_gradients(ctx)


async def test_results_outside_a_context_need_no_gradient() -> None:
    async with group_of(2) as (_, keepers):
        assert (await ask(keepers["b"], "times", leaf())).grad_fn is None
        with pytest.raises(asyncrpc.errors.InvalidContextError):
            current_context()


async def through_a_gate(k: Keepers, x: torch.Tensor) -> torch.Tensor:
    """Return a root whose pass stops on `b` after it has come to what `b` received."""
    later = await ask(k["b"], "slowly", x, "gate")
    other = await ask(k["b"], "times", x)
    root: torch.Tensor = (later + other).sum()
    return root


@PROGRAMS
async def test_cancelled_pass_leaves_nothing_behind(program: Program) -> None:
    """Its engine call goes on in a thread, and ends when others run already."""
    wanted = await in_one_process(program, "ab")
    async with group_of(2) as (workers, keepers), context() as ctx:
        x = leaf()
        roots = await program(keepers, x)
        slow = await through_a_gate(keepers, x)
        with Gate("gate") as gate:
            cancelled = asyncio.create_task(backward(ctx, slow, retain_graph=True))
            await gate.reached.wait()
            cancelled.cancel()
            with pytest.raises(asyncio.CancelledError):
                await cancelled
            assert get_gradients(ctx) == {}
            ones = [torch.ones_like(root) for root in roots]
            after = asyncio.create_task(backward(ctx, roots, gradients=ones))
            await workers[0].peer("b").call(int)
            gate.let_go()
            await after
        assert_equal(await reports(keepers, ctx, x), wanted)


async def test_a_context_is_entered_once() -> None:
    async with group_of(1):
        ctx = context()
        async with ctx:
            with pytest.raises(asyncrpc.UsageError, match="entered before"):
                await ctx.__aenter__()
            assert current_context() is ctx
            assert get_gradients(ctx) == {}
        with pytest.raises(asyncrpc.UsageError, match="entered before"):
            await ctx.__aenter__()


async def test_leaving_the_context_fails_its_passes() -> None:
    async with group_of(2) as (workers, keepers):
        with Gate("gate") as gate:
            async with context() as ctx:
                root = await through_a_gate(keepers, leaf())
                running = asyncio.create_task(backward(ctx, root))
                await gate.reached.wait()
            with pytest.raises(asyncrpc.errors.AutogradError, match="left"):
                await running
            await all_released(workers)
        with pytest.raises(asyncrpc.errors.InvalidContextError, match="ended"):
            await backward(ctx, root)


async def test_late_function_does_not_revive_its_context() -> None:
    async with group_of(3) as (workers, keepers):
        with Gate("gate") as gate:
            async with context():
                call = ask(keepers["b"], "later", keepers["c"], "gate", leaf())
                running = asyncio.create_task(call)
                await gate.reached.wait()
            await all_released(workers)
            gate.let_go()
            await running
        assert [open_contexts(worker) for worker in workers] == [0, 0, 0]


async def test_contexts_of_a_worker_that_ends_end_with_it() -> None:
    async with group_of(3) as (workers, keepers):
        a, b, c = workers
        with acting_as(b):
            ctx = context()
            await ctx.__aenter__()
            await b.peer("c").call(torch.sin, leaf())
            await ctx.__aexit__()
            left = context()
            await left.__aenter__()
            y = await b.peer("c").call(torch.sin, leaf())
            assert y.requires_grad
        assert open_contexts(c) >= 1
        await b.shutdown(drain_timeout_s=0)
        async with asyncio.timeout(30):
            while open_contexts(c):
                await a.peer("c").call(int)
        del keepers


async def test_context_ends_where_its_lost_bearer_brought_it() -> None:
    """Only `b` knew that it had gone on to `c`: `c` asks the one who opened it."""
    async with group_of(3) as (workers, keepers):
        a, b, c = workers
        with acting_as(a):
            ctx = context()
            await ctx.__aenter__()
            await ask(keepers["b"], "relay", keepers["c"], "times", leaf())
            await b.shutdown(drain_timeout_s=0)
            await until(lambda: is_joined(a, c))
            assert open_contexts(c) == 1  # it is still open, says `a`
            await ctx.__aexit__()
        await until(lambda: not open_contexts(c))
        del keepers


async def test_ended_context_ends_where_its_last_bearer_is_lost() -> None:
    async with group_of(3) as (workers, keepers):
        a, b, c = workers
        async with context() as ctx:
            await ask(keepers["b"], "relay", keepers["c"], "times", leaf())
            state_on(b, ctx.id).sent_to.clear()  # so it cannot tell `c`
        await until(lambda: not open_contexts(b))
        assert open_contexts(c) == 1
        await b.shutdown(drain_timeout_s=0)
        await until(lambda: not open_contexts(c))
        assert not open_contexts(a)
        del keepers


def state_on(worker: Worker, context_id: Any) -> Any:
    service: Any = worker.parts.service("autograd")
    return service.state(context_id)


def is_joined(opener: Worker, other: Worker) -> bool:
    """Whether the worker that opened the only context knows that `other` has it."""
    service: Any = opener.parts.service("autograd")
    (state,) = service.contexts.open.values()
    return other.id in state.peers


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not is_so():  # noqa: ASYNC110  (nothing tells us)
            await asyncio.sleep(0.01)


async def there(method: str, keeper: RRef[Keeper]) -> tuple[tuple[int, int], Any]:
    """Open a context on the worker that this runs on, and run a pass in it."""
    async with context() as ctx:
        x = leaf()
        y = await ask(keeper, method, x)
        await backward(ctx, y.sum())
        await ask(keeper, "report")
        creator, serial = ctx.id
        return (creator, serial), get_gradients(ctx)[x]


async def test_a_function_may_open_a_context_inside_its_callers() -> None:
    async with group_of(3) as (workers, keepers):
        a = workers[0]
        async with context() as ctx:
            inner, gradient = await a.peer("b").call(there, "times", keepers["c"])
            assert inner != tuple(ctx.id)
            assert current_context() is ctx
            with pytest.raises(asyncrpc.errors.InvalidContextError, match="not open"):
                get_gradients(a_context(a, inner))
        x = leaf()
        (wanted,) = torch.autograd.grad(Keeper(2).times(x).sum(), x)
        torch.testing.assert_close(gradient, wanted)
        await all_released(workers)


def a_context(worker: Worker, context_id: tuple[int, int]) -> Any:
    service: Any = worker.parts.service("autograd")
    return service.context_of(context_id)


async def test_tensor_of_another_context_is_refused() -> None:
    async with group_of(2) as (_, keepers), context():
        y = await ask(keepers["b"], "times", leaf())
        async with context() as inner:
            z = await ask(keepers["b"], "times", y)
            with pytest.raises(
                asyncrpc.errors.BackwardFailedError, match="another context"
            ):
                await backward(inner, z.sum())


async def test_a_pass_may_start_where_the_context_was_not_opened() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = await ask(k["b"], "keep", 0, x)
        return [await ask(k["c"], "relay", k["b"], "use", 0, y)]

    wanted = await in_one_process(program, "abc")
    async with group_of(3) as (workers, keepers), context() as ctx:
        x = leaf()
        y = await ask(keepers["b"], "keep", 0, x)
        root = workers[0].peer("c").remote(total_of_use, keepers["b"], y)
        await root.backward(ctx)
        assert_equal(await reports(keepers, ctx, x), wanted)


async def total_of_use(keeper: Any, value: torch.Tensor) -> torch.Tensor:
    output: torch.Tensor = await ask(keeper, "use", 0, value)
    return output.sum()
