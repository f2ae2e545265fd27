"""Passes that go through a worker more than once have the gradients of one process.

There starts run as their gradients come, in several engine calls that overlap in the
graph: see "Whole and partial" in docs/explanation/autograd.md.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.core.services.ports import PeerLink
from tests.inner_state import routes_of
from tests.numerics.stateful_objects import (
    Keepers,
    ask,
    assert_equal,
    check,
    deaf,
    distributed,
    group_of,
    in_one_process,
    leaf,
    reports,
)

Roots = list[torch.Tensor]


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
@pytest.mark.parametrize("through", ["b", "ab", "bc", "abc"])
async def test_gradients_of_a_value_sent_to_and_fro_are_right(
    through: str, depth: int
) -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        for turn in range(depth):
            for name in through:
                x = (await ask(k[name], "times", x, turn % 2)).cos()
        return [x]

    await check(program, "abc")


async def test_a_gradient_for_the_worker_that_asked_goes_with_the_answer() -> None:
    """So there and back is one request, and not two."""
    async with group_of(2) as (workers, keepers), context() as ctx:
        asked: Counter[str] = Counter()
        for worker in workers:
            count_requests(worker, asked)
        y = leaf()
        for _ in range(4):
            y = (await ask(keepers["b"], "times", y)).cos()
        await backward(ctx, y.sum())
        assert asked == {"b": 4}


def count_requests(worker: Worker, asked: Counter[str]) -> None:
    """Count the requests of backward passes that come to a worker."""
    routes = routes_of(worker.parts.router, "autograd")
    (route,) = (route for route in routes if route.method == "advance")
    handle = route.handle

    def count(link: PeerLink, value: Any) -> Any:
        asked[worker.name] += 1
        return handle(link, value)

    route.handle = count


@pytest.mark.parametrize("way", ["ab", "bab", "abab", "babcab", "aab"])
async def test_nested_calls_come_back_through_workers_that_wait(way: str) -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        first, *others = (k[name] for name in way)
        return [await ask(first, "way", others, x)]

    await check(program, "abc")


async def test_tensors_of_one_message_get_their_gradients_at_different_times() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        early, late = await ask(k["b"], "both", x)
        late = await ask(k["b"], "times", late)
        return [early * late]

    await check(program)


async def test_gradients_of_several_tensors_sent_to_and_fro_are_right() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        first, second = await ask(k["b"], "both", x)
        for turn in range(3):
            joined = await ask(k["bc"[turn % 2]], "join", first, second)
            second, last = await ask(k["b"], "both", joined * first)
            first = last.sin()
        return [first * second]

    await check(program, "abc")


async def test_unused_tensor_of_a_message_is_not_waited_for() -> None:
    """The other has no part at all, so nothing may wait for it."""

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        _unused, used = await ask(k["b"], "both", x)
        return [await ask(k["b"], "times", used)]

    await check(program)


async def test_kept_nodes_are_shared_by_two_sends() -> None:
    """The kept node gets its gradient in two parts, one of which goes round first."""

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        first = await ask(k["b"], "keep", 0, x)
        second = await ask(k["b"], "use", 0, first)
        third = await ask(k["b"], "use", 0, second * first)
        return [third + second]

    await check(program)


async def test_kept_nodes_are_shared_by_sends_to_several_workers() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        await ask(k["b"], "keep", 0, x)
        there = await ask(k["c"], "relay", k["b"], "give", 0)
        (here,) = await ask(k["b"], "give", 0)
        await ask(k["c"], "keep", 1, there[0])
        round_ = await ask(k["b"], "relay", k["c"], "use", 1, here.sin())
        return [await ask(k["b"], "use", 0, round_)]

    await check(program, "abc")


async def test_parameters_sent_and_used_locally_get_whole_gradients() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        weight = await ask(k["b"], "parameter", 0)
        once = await ask(k["b"], "times", weight * x)
        return [await ask(k["b"], "join", once, weight)]

    await check(program)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.complex128])
@pytest.mark.parametrize("between", [(2, 3), (4, 1, 3), (3,)])
async def test_broadcast_tensor_gets_its_whole_gradient(
    between: tuple[int, ...], dtype: torch.dtype
) -> None:
    """Each node gives its gradient in the shape and dtype of what it computed."""
    behind = torch.ones(4, 2, 3, dtype=dtype)

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        x = x.sin()
        y = await ask(k["b"], "times", x)
        y = await ask(k["b"], "times", torch.ones(between, dtype=y.dtype) * x * y)
        result = (behind * x) * y
        return [result.real if result.is_complex() else result]

    await check(program)


async def test_a_received_tensor_goes_on_unchanged() -> None:
    """Where it is received and sent, no node lies between the two ends."""

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = await ask(k["b"], "times", x)
        for _ in range(2):
            y = await ask(k["c"], "relay", k["b"], "echo", y)
        return [y, await ask(k["b"], "echo", x)]

    await check(program, "abc")


async def test_tensor_sent_in_several_messages_gets_its_whole_gradient() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = x.sin()
        calls = [ask(k["b"], "times", y, index) for index in (0, 1, 0)]
        results = await asyncio.gather(*calls, ask(k["b"], "way", [], y))
        results.append(await ask(k["b"], "join", results[0], y))
        return [torch.stack(results).prod(0)]

    await check(program)


async def test_unused_result_costs_and_changes_nothing() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        assert (await ask(k["c"], "times", x)).requires_grad
        return [await ask(k["b"], "times", x)]

    assert (await check(program, "abc"))["c"].gradients == [None, None]


async def test_gradients_flow_through_references() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        weight = await ask(k["b"], "parameter", 1)
        middle = await ask(k["c"], "join", weight, x)
        return [await ask(k["b"], "join", middle, x), middle]

    async def by_references(k: Keepers, x: torch.Tensor) -> Roots:
        weight, own = k["b"].remote().parameter(1), RRef(x)
        middle = k["c"].remote().join_references(weight, own)
        return [await ask(k["b"], "join_references", middle, x), await middle]

    wanted = await in_one_process(program, "abc")
    assert_equal(await distributed(by_references, "abc"), wanted)


async def test_gradient_is_that_of_the_value_that_was_sent() -> None:
    async def program(k: Keepers, x: torch.Tensor, *, in_place: bool) -> Roots:
        middle = x * 2
        y = await ask(k["b"], "times", middle)
        return [y + (middle.add_(1) if in_place else middle + 1)]

    wanted = await in_one_process(partial(program, in_place=False), "ab")
    assert_equal(await distributed(partial(program, in_place=True), "ab"), wanted)


async def test_roots_of_any_shape_take_gradients() -> None:
    """Only numbers need none."""
    weights = torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        return [await ask(k["b"], "times", x) * (weights + 2), x]

    wanted = await in_one_process(program, "ab")
    async with group_of(2) as (_, k), context() as ctx:
        x = leaf()
        y = await ask(k["b"], "times", x)
        with pytest.raises(asyncrpc.UsageError, match="not a real scalar"):
            await backward(ctx, [y])
        await backward(ctx, [y, y.sum()], gradients=[weights, None], retain_graph=True)
        await backward(ctx, [y.sum(), x.sum()])
        assert_equal(await reports(k, ctx, x), wanted)


async def test_tensor_repeated_in_messages_gets_its_whole_gradient() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = x.sin()
        once, again, part = await ask(k["b"], "echo", [y, y, y[:2]])
        z = await ask(k["b"], "join", once, again)
        return [z[:2] * part]

    await check(program)


async def test_received_tensors_may_change_in_place() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = await ask(k["b"], "in_place", x * 2)
        y.mul_(3)
        z = await ask(k["b"], "in_place", y.clone())
        z += y
        return [z]

    await check(program)


@pytest.mark.parametrize("once", [False, True])
async def test_nil_gradient_has_no_effect(*, once: bool) -> None:
    """As in one process, where `.grad` stays None."""

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        nil = await ask(k["c"], "times", x.detach() if once else x)
        real = await ask(k["b"], "times", torch.ones_like(x))
        return [deaf(nil, real) if once else await ask(k["b"], "deaf", nil, real)]

    reports = await check(program, "abc")
    assert reports["c"].gradients == [None, None]
    assert reports["x"].gradients == [None]


async def test_a_nil_gradient_goes_on_through_workers_in_a_cycle() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        nil = await ask(k["b"], "times", await ask(k["b"], "times", x, 1), 1)
        real = await ask(k["b"], "times", torch.ones_like(x))
        return [await ask(k["b"], "deaf", nil, real)]

    results = await check(program, "ab")
    assert results["b"].gradients[1] is None


@pytest.mark.parametrize("names", ["a", "ab"])
async def test_a_worker_may_call_itself(names: str) -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = await ask(k["a"], "keep", 0, x)
        z = await ask(k[names[-1]], "times", y)
        return [await ask(k["a"], "use", 0, z)]

    await check(program, names)


async def test_root_that_depends_on_another_root_is_differentiated() -> None:
    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        first = await ask(k["b"], "times", x)
        second = await ask(k["b"], "join", first, x)
        return [second, first, first, x]

    await check(program)


async def round_trip(k: Keepers, x: torch.Tensor) -> Roots:
    y = await ask(k["b"], "keep", 0, x)
    return [await ask(k["b"], "use", 0, y)]


@pytest.mark.parametrize("passes", [2, 3])
async def test_passes_over_a_kept_graph_add_up(passes: int) -> None:
    await check(round_trip, passes=passes)


async def test_unkept_graph_is_freed_where_a_pass_went_twice() -> None:
    async with group_of(2) as (_, keepers), context() as ctx:
        (y,) = await round_trip(keepers, leaf())
        await backward(ctx, y.sum())
        before = (await ask(keepers["b"], "report")).gradients
        with pytest.raises(asyncrpc.errors.BackwardFailedError, match="second time"):
            await backward(ctx, y.sum())
        after = (await ask(keepers["b"], "report")).gradients
    torch.testing.assert_close(after, before, rtol=0, atol=0)
