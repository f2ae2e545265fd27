"""Hooks fire as in one process: once for a parameter, on its whole gradient.

torch's DistributedDataParallel learns of gradients by them.  So they must, however
many engine calls a pass takes on a worker, and `.grad` must look untouched afterwards.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

import asyncrpc
from asyncrpc.autograd import backward, context
from tests.numerics.stateful_objects import Keepers, Program, ask, check, group_of, leaf

Roots = list[torch.Tensor]
KINDS = {"tensor", "into", "accumulated", "node"}


async def straight(k: Keepers, x: torch.Tensor) -> Roots:
    """Use the parameter in two calls, which run in one engine call.

    The input needs no gradient: else the pass would come back to where it began.
    """
    x = x.detach()
    left, right = await ask(k["b"], "times", x), await ask(k["b"], "times", x.cos())
    return [left * right]


async def to_and_fro(k: Keepers, x: torch.Tensor) -> Roots:
    """Use it in three calls, of which each needs the one before."""
    for _ in range(3):
        x = (await ask(k["b"], "times", x)).cos()
    return [x]


async def shared(k: Keepers, x: torch.Tensor) -> Roots:
    """Use it in a node that is kept, and reached by three sends."""
    y = await ask(k["b"], "keep", 0, x)
    z = await ask(k["b"], "use", 0, y)
    return [await ask(k["b"], "use", 0, z)]


async def send_parameter_twice(k: Keepers, x: torch.Tensor) -> Roots:
    """Send the parameter itself, twice."""
    weights = [await ask(k["b"], "parameter", 0) for _ in range(2)]
    return [await ask(k["b"], "join", weights[0], weights[1] * x)]


PROGRAMS = [straight, to_and_fro, shared, send_parameter_twice]


def watched(program: Program, clamp: float) -> Program:
    async def hooked(k: Keepers, x: torch.Tensor) -> Roots:
        await ask(k["b"], "watch", clamp)
        return list(await program(k, x))

    return hooked


@pytest.mark.parametrize("clamp", [0.0, 0.05], ids=["only look", "change"])
@pytest.mark.parametrize("program", PROGRAMS)
async def test_hooks_of_a_parameter_see_its_whole_gradient_once(
    program: Program, clamp: float
) -> None:
    report = (await check(watched(program, clamp), "ab"))["b"]
    assert sorted(kind for kind, _ in report.seen) == sorted(KINDS)
    if clamp:
        assert report.gradients[0] is not None
        assert report.gradients[0].abs().max() <= clamp


@pytest.mark.parametrize("program", PROGRAMS)
async def test_hooks_fire_in_every_pass(program: Program) -> None:
    """In one process the later ones see what has accumulated; here, the pass's own."""
    async with group_of(2) as (_, keepers), context() as ctx:
        (y,) = await watched(program, 0.0)(keepers, leaf())
        for _ in range(2):
            await backward(ctx, y.sum(), retain_graph=True)
        report = await ask(keepers["b"], "report")
    assert len(report.seen) == 2 * len(KINDS)
    first, second = report.seen[: len(KINDS)], report.seen[len(KINDS) :]
    assert [kind for kind, _ in first] == [kind for kind, _ in second]
    for (_, gradient), (_, other) in zip(first, second, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-12, atol=1e-12)
    accumulated = dict(second)["accumulated"]
    torch.testing.assert_close(report.gradients[0], 2 * accumulated)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_existing_grads_stay_unchanged(program: Program) -> None:
    async with group_of(2) as (_, keepers):
        await ask(keepers["b"], "set_grads", 7.0)
        x = leaf()
        x.grad = torch.full_like(x, 7.0)
        async with context() as ctx:
            (y,) = await program(keepers, x)
            await backward(ctx, y.sum())
            report = await ask(keepers["b"], "report")
        for grad in (x.grad, *await ask(keepers["b"], "grads")):
            assert torch.equal(grad, torch.full_like(grad, 7.0))
    assert report.gradients[0].abs().max() < 7


@pytest.mark.parametrize("program", [straight, to_and_fro])
async def test_hooks_survive_a_failed_pass(program: Program) -> None:
    async with group_of(2) as (_, keepers), context() as ctx:
        (good,) = await watched(program, 0.0)(keepers, leaf())
        bad = await ask(keepers["b"], "failing", good, ValueError("no way"))
        with pytest.raises(asyncrpc.errors.BackwardFailedError):
            await backward(ctx, bad.sum(), retain_graph=True)
        before = len((await ask(keepers["b"], "report")).seen)
        await backward(ctx, good.sum(), retain_graph=True)
        report = await ask(keepers["b"], "report")
        grads = await ask(keepers["b"], "grads")
    assert len(report.seen) - before == len(KINDS)
    assert grads == [None, None]


@pytest.mark.parametrize("to_and_fro", [False, True])
async def test_hooks_of_received_tensors_see_and_may_change_gradients(
    *, to_and_fro: bool
) -> None:
    seen: list[torch.Tensor] = []

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return -2 * gradient

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = await ask(k["b"], "times", x)
        y.register_hook(hook)
        return [await ask(k["b"], "times", y, 1) if to_and_fro else y.sin()]

    await check(program)
    one_process, workers = seen
    torch.testing.assert_close(workers, one_process, rtol=1e-12, atol=1e-12)


def watch(y: torch.Tensor, how: str, seen: list[torch.Tensor]) -> None:
    node = get_gradient_edge(y).node
    if how == "tensor":
        y.register_hook(seen.append)  # type: ignore[no-untyped-call]
    elif how == "node":
        node.register_hook(lambda _out, into: seen.append(into[0]))
    elif how == "into":
        node.register_prehook(lambda into: seen.append(into[0]))
    else:
        y.retain_grad()


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("how", ["tensor", "node", "into", "retained"])
async def test_hook_of_a_forwarded_tensor_sees_its_gradient(
    how: str, *, is_late: bool
) -> None:
    """The engine has nothing to do there, and does it if somebody looks."""
    seen: list[torch.Tensor] = []
    received: list[torch.Tensor] = []

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        y = await ask(k["b"], "times", x)
        received.append(y)
        if not is_late:
            watch(y, how, seen)
        z = await ask(k["b"], "times", y, 1)
        if is_late:
            watch(y, how, seen)
        return [z]

    await check(program)
    if how == "retained":
        seen = [tensor.grad for tensor in received if tensor.grad is not None]
    one_process, workers = seen
    torch.testing.assert_close(workers, one_process, rtol=1e-12, atol=1e-12)


async def test_a_node_runs_once_where_a_pass_goes_through_once() -> None:
    """Gradients for the kept tensor come from `a` and, later, from `b`."""

    async def program(k: Keepers, x: torch.Tensor) -> Roots:
        await ask(k["c"], "keep", 0, x.detach())
        await ask(k["c"], "hook_kept", 0)
        (here,) = await ask(k["c"], "give", 0)
        (there,) = await ask(k["b"], "relay", k["c"], "give", 0)
        return [here * await ask(k["b"], "times", there.detach()) + there.sin()]

    results = await check(program, "abc")
    assert [kind for kind, _ in results["c"].seen] == ["kept"]


async def test_hook_may_change_existing_gradients() -> None:
    """As torch's DistributedDataParallel does, once it has all of a bucket.

    The pass leaves this worker between the two parameters, and comes back.
    """
    first, last = leaf(), leaf()

    def reduce(_parameter: torch.Tensor) -> None:
        for parameter in (first, last):
            assert parameter.grad is not None
            parameter.grad.mul_(10)

    first.register_post_accumulate_grad_hook(reduce)  # type: ignore[no-untyped-call]
    async with group_of(2) as (_, keepers), context() as ctx:
        y = await ask(keepers["b"], "times", first.cos())
        await backward(ctx, (y * last).sum())
        gradients = asyncrpc.autograd.get_gradients(ctx)
        want = torch.autograd.grad((y.detach() * last).sum(), last)[0]
        torch.testing.assert_close(gradients[last], 10 * want)
        assert set(gradients) == {first, last}
    assert first.grad is None
    assert last.grad is None
