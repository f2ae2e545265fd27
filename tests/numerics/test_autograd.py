"""A backward pass over several workers gives the gradients of one process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import RRef, Worker, autograd
from asyncrpc.autograd import Context
from asyncrpc.testing import Cluster, acting_as
from tests.numerics import formulas

NAMES = ["a", "b", "c"]
Trio = tuple[Worker, Worker, Worker]


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    formulas.make_parameters(NAMES, 3, seed=1)
    async with Cluster(names=NAMES) as (a, b, c):
        with acting_as(a):
            yield a, b, c


def leaf(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + seed)
    made = torch.randn(formulas.SHAPE, dtype=torch.double, generator=generator)
    return made.requires_grad_()


async def gathered(a: Worker, context: Context) -> dict[str, Any]:
    return {
        name: await a.peer(name).call(formulas.gradients_here, tuple(context.id))
        for name in NAMES
    }


def expected(
    root: Callable[..., torch.Tensor], *leaves: torch.Tensor
) -> dict[str, Any]:
    """Run the same in one process; `root` is given the leaves and all parameters."""
    flat = [one for name in NAMES for one in formulas.parameters[name]]
    found = torch.autograd.grad(
        root(*leaves, formulas.parameters), [*leaves, *flat], allow_unused=True
    )
    rest = list(found[len(leaves) :])
    return {
        "leaves": list(found[: len(leaves)]),
        **{name: [rest.pop(0) for _ in formulas.parameters[name]] for name in NAMES},
    }


def assert_same(found: list[Any], wanted: list[Any]) -> None:
    """Compare values, and where there is none."""
    if not found:
        found = [None] * len(wanted)
    assert [one is None for one in found] == [one is None for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


async def check(
    a: Worker, context: Context, wanted: dict[str, Any], *leaves: torch.Tensor
) -> None:
    local = autograd.get_gradients(context)
    assert_same([local.get(one) for one in leaves], wanted["leaves"])
    found = await gathered(a, context)
    for name in NAMES:
        assert_same(found[name], wanted[name])
    for name in NAMES:
        assert all(one.grad is None for one in formulas.parameters[name])


async def test_gradients_of_a_zigzag_equal_one_process(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.zigzag, ["a", "b", "c", "a"], x)
        z = await a.peer("b").call(formulas.zigzag, ["a"], y * x)
        await autograd.backward(context, [z.sum()])

        def whole(x: torch.Tensor, p: Any) -> torch.Tensor:
            def zigzag(way: str, value: torch.Tensor) -> torch.Tensor:
                for name in way:
                    value = value * p[name][0]
                for name in reversed(way):
                    value = value * p[name][1]
                return value

            return zigzag("ba", zigzag("babca", x) * x).sum()

        await check(a, context, expected(whole, x), x)


async def test_several_calls_to_one_worker_share_its_parameters(trio: Trio) -> None:
    a, _, _ = trio
    x, y = leaf(1), leaf(2)
    async with autograd.context() as context:
        calls = [
            a.parts.start_call("b", formulas.combine, (x, y, i)) for i in (0, 1, 0)
        ]
        calls.append(a.parts.start_call("b", formulas.combine_in_thread, (y, x, 0)))
        results = await asyncio.gather(*calls)
        await autograd.backward(context, [torch.stack(results).prod()])

        def whole(x: torch.Tensor, y: torch.Tensor, p: Any) -> torch.Tensor:
            b = p["b"]
            found = [formulas.formula(x, y, b[i]) for i in (0, 1, 0)]
            return torch.stack([*found, formulas.formula(y, x, b[0])]).prod()

        await check(a, context, expected(whole, x, y), x, y)


async def test_unused_result_costs_and_changes_nothing(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        used = await a.peer("b").call(formulas.combine, x, x, 0)
        unused = await a.peer("c").call(formulas.combine, x, x, 1)
        await autograd.backward(context, [used.sum()])
        assert unused.requires_grad
        wanted = expected(lambda x, p: formulas.formula(x, x, p["b"][0]).sum(), x)
        await check(a, context, wanted, x)


async def test_gradients_flow_through_references(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        weight = a.peer("b").remote(formulas.parameter, 2)
        own: RRef[torch.Tensor] = RRef(x)
        middle = a.peer("c").remote(formulas.combine, weight, own, 1)
        result = await a.peer("b").call(formulas.combine, middle, x, 0)
        await autograd.backward(context, [(result + await middle).sum()])

        def whole(x: torch.Tensor, p: Any) -> torch.Tensor:
            middle = formulas.formula(p["b"][2], x, p["c"][1])
            return (formulas.formula(middle, x, p["b"][0]) + middle).sum()

        await check(a, context, expected(whole, x), x)


async def test_backward_works_on_a_reference(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        result = a.peer("b").remote(formulas.combine, x, x, 0)
        total = result.remote().sum()
        await total.backward(context)
        wanted = expected(lambda x, p: formulas.formula(x, x, p["b"][0]).sum(), x)
        await check(a, context, wanted, x)


async def test_gradients_of_several_roots_equal_one_process(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        first = await a.peer("b").call(formulas.combine, x, x, 0)
        second = await a.peer("c").call(formulas.combine, first, x, 0)
        await autograd.backward(context, [first.sum(), second.sum(), x.sum()])

        def whole(x: torch.Tensor, p: Any) -> torch.Tensor:
            first = formulas.formula(x, x, p["b"][0])
            return (first + formulas.formula(first, x, p["c"][0]) + x).sum()

        await check(a, context, expected(whole, x), x)


async def test_roots_of_any_shape_take_gradients(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    weights = torch.tensor([1.0, -2.0, 3.0], dtype=torch.double)
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.combine, x, x, 0)
        with pytest.raises(asyncrpc.UsageError, match="not a real scalar"):
            await autograd.backward(context, [y])
        await autograd.backward(context, [y, y.sum()], gradients=[weights, None])
        wanted = expected(
            lambda x, p: (formulas.formula(x, x, p["b"][0]) * (weights + 1)).sum(), x
        )
        await check(a, context, wanted, x)


async def test_passes_accumulate_while_the_graph_is_kept(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        loss = (await a.peer("b").call(formulas.zigzag, ["c", "b"], x)).sum()
        await autograd.backward(context, [loss], retain_graph=True)
        await autograd.backward(context, [loss], retain_graph=True)

        def whole(x: torch.Tensor, p: Any) -> torch.Tensor:
            b, c = p["b"], p["c"]
            value: torch.Tensor = x * b[0] * c[0] * b[0] * b[1] * c[1] * b[1]
            return value.sum() * 2

        await check(a, context, expected(whole, x), x)


async def test_freed_graph_cannot_be_used_again(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        loss = (await a.peer("b").call(formulas.combine, x, x, 0)).sum()
        await autograd.backward(context, [loss])
        before = await gathered(a, context)
        with pytest.raises(asyncrpc.errors.BackwardFailedError, match="second time"):
            await autograd.backward(context, [loss])
        after = await gathered(a, context)
        assert_same(after["b"], before["b"])


async def test_received_tensors_may_be_changed_in_place(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.in_place, x * 2)
        y.mul_(3)
        await autograd.backward(context, [y.sum()])
        wanted = expected(lambda x, p: ((x * 2 * p["b"][0] + 1) ** 2 * 3).sum(), x)
        await check(a, context, wanted, x)


async def test_gradient_is_that_of_the_value_that_was_sent(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        middle = x * 2
        y = await a.peer("b").call(formulas.combine, middle, x, 0)
        middle.add_(1)
        await autograd.backward(context, [(y + middle).sum()])

        def whole(x: torch.Tensor, p: Any) -> torch.Tensor:
            return (formulas.formula(x * 2, x, p["b"][0]) + x * 2 + 1).sum()

        await check(a, context, expected(whole, x), x)


async def test_existing_grad_is_unchanged(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    x.grad = torch.full_like(x, 7.0)
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.combine, x, x, 0)
        await autograd.backward(context, [y.sum()])
        assert torch.equal(x.grad, torch.full_like(x, 7.0))
        (wanted,) = expected(lambda x, p: formulas.formula(x, x, p["b"][0]).sum(), x)[
            "leaves"
        ]
        assert_same([autograd.get_gradients(context)[x]], [wanted])


@pytest.mark.parametrize("way", [[], ["a", "b"]], ids=["straight", "to and fro"])
async def test_hooks_see_each_whole_gradient_once(trio: Trio, way: list[str]) -> None:
    a, _, _ = trio
    weight: Any = formulas.parameters["b"][0]
    seen: dict[str, list[Any]] = {"tensor": [], "accumulated": [], "node": []}
    node = torch.autograd.graph.get_gradient_edge(weight).node
    hooks = [
        weight.register_hook(lambda gradient: seen["tensor"].append(gradient.clone())),
        weight.register_post_accumulate_grad_hook(
            lambda one: seen["accumulated"].append(
                None if one.grad is None else one.grad.clone()
            )
        ),
        node.register_hook(lambda *_: seen["node"].append(1)),
    ]
    x = leaf()
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.zigzag, way, x)
        await autograd.backward(context, [y.sum()])
        found = (await gathered(a, context))["b"][0]
    for hook in hooks:
        hook.remove()
    assert_same(seen["tensor"], [found])
    assert_same(seen["accumulated"], [found])
    assert seen["node"] == [1]
    assert weight.grad is None


async def test_a_node_that_fails_undoes_the_pass_everywhere_and_names_its_worker(
    trio: Trio,
) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as context:
        good = await a.peer("c").call(formulas.combine, x, x, 0)
        await autograd.backward(context, [good.sum()], retain_graph=True)
        before = {**(await gathered(a, context)), "x": autograd.get_gradients(context)}
        bad = await a.peer("b").call(formulas.failing, good)
        with pytest.raises(
            asyncrpc.errors.BackwardFailedError, match="cannot go backward"
        ) as e:
            await autograd.backward(
                context, [bad.sum() + good.sum()], retain_graph=True
            )
        assert e.value.worker == "b"
        after = {**(await gathered(a, context)), "x": autograd.get_gradients(context)}
        for name in NAMES:
            assert_same(after[name], before[name])
        assert_same([after["x"][x]], [before["x"][x]])
        await autograd.backward(context, [good.sum()])
        again = (await gathered(a, context))["c"][0]
        assert_same([again], [2 * before["c"][0]])


async def test_contexts_of_two_tasks_never_mix(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()

    async def one_pass(scale: float) -> Any:
        async with autograd.context() as context:
            for _ in range(5):
                assert await a.peer("b").call(formulas.context_here) == tuple(
                    context.id
                )
            y = await a.peer("b").call(formulas.combine, x * scale, x, 0)
            await autograd.backward(context, [y.sum()])
            return autograd.get_gradients(context)[x]

    found = await asyncio.gather(*(one_pass(float(i)) for i in range(1, 9)))
    for i, gradient in enumerate(found, 1):
        wanted = expected(
            lambda x, p, i=i: formulas.formula(x * i, x, p["b"][0]).sum(), x
        )
        assert_same([gradient], wanted["leaves"])


async def test_nested_contexts_are_separate(trio: Trio) -> None:
    a, _, _ = trio
    x = leaf()
    async with autograd.context() as outer:
        y = await a.peer("b").call(formulas.combine, x, x, 0)
        async with autograd.context() as inner:
            z = await a.peer("b").call(formulas.combine, x, x, 1)
            await autograd.backward(inner, [z.sum()])
        await autograd.backward(outer, [y.sum()])
        wanted = expected(lambda x, p: formulas.formula(x, x, p["b"][0]).sum(), x)
        await check(a, outer, wanted, x)


async def test_contexts_end_on_every_worker_that_they_reached(trio: Trio) -> None:
    a, b, c = trio
    services: list[Any] = [one.parts.service("autograd") for one in (a, b, c)]
    x = leaf()
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.combine_by_way_of, "c", x, x, 0)
        assert [one.open_contexts for one in services] == [1, 1, 1]
        await autograd.backward(context, [y.sum()])
    async with asyncio.timeout(30):
        while any(one.open_contexts for one in services):  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0)
    with pytest.raises(asyncrpc.errors.InvalidContextError, match="ended"):
        autograd.get_gradients(context)
    with pytest.raises(asyncrpc.errors.InvalidContextError):
        await autograd.backward(context, [y.sum()])


async def test_results_outside_a_context_need_no_gradient(trio: Trio) -> None:
    a, _, _ = trio
    y = await a.peer("b").call(formulas.combine, leaf(), leaf(1), 0)
    assert y.grad_fn is None
    with pytest.raises(asyncrpc.errors.InvalidContextError):
        autograd.current_context()


async def test_roots_without_a_gradient_are_refused(trio: Trio) -> None:
    async with autograd.context() as context:
        with pytest.raises(asyncrpc.errors.NoGradientPathError):
            await autograd.backward(context, [torch.ones(())])
        with pytest.raises(asyncrpc.UsageError, match="at least one root"):
            await autograd.backward(context, [])


async def test_worker_lost_during_a_pass_fails_it(trio: Trio) -> None:
    a, b, _ = trio
    x = leaf()
    async with autograd.context() as context:
        y = await a.peer("b").call(formulas.combine, x, x, 0)
        await b.shutdown(drain_timeout_s=0)
        with pytest.raises(asyncrpc.errors.AutogradError):
            await autograd.backward(context, [y.sum()])
        assert autograd.get_gradients(context) == {}
