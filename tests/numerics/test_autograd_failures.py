"""A pass that fails is undone on every worker, and says where and why it failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Worker
from asyncrpc.autograd import Context, backward, context, get_gradients
from asyncrpc.core.services.ports import PeerLink
from tests import raw_messages
from tests.numerics.stateful_objects import (
    Gate,
    Keepers,
    ask,
    assert_equal,
    failing,
    group_of,
    leaf,
    reports,
)


class CustomError(Exception):
    """One that torch and this package know nothing of."""


ERRORS = [ValueError("no way back"), RuntimeError("no way back"), CustomError("no way")]


async def sum_by_way_of_b(k: Keepers, x: torch.Tensor) -> torch.Tensor:
    y = await ask(k["b"], "times", x)
    z: torch.Tensor = await ask(k["b"], "relay", k["c"], "times", y)
    return z.sum()


async def failing_on(
    k: Keepers, where: str, x: torch.Tensor, error: Exception
) -> torch.Tensor:
    """Return a root that depends on the others, on `x`, and on a node that fails."""
    if where == "a":
        x = failing(x, error)
    else:
        x = await ask(k[where], "failing", x, error)
    return await sum_by_way_of_b(k, x)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("where", ["a", "b", "c"])
async def test_a_node_that_fails_changes_nothing_anywhere(
    where: str, error: Exception, *, needs_gradient: bool
) -> None:
    async with group_of(3) as (_, keepers), context() as ctx:
        x = leaf()
        good = await sum_by_way_of_b(keepers, x)
        await backward(ctx, good, retain_graph=True)
        before = await reports(keepers, ctx, x)
        value = x if needs_gradient or where == "a" else x.detach()
        bad = await failing_on(keepers, where, value, error)
        with pytest.raises(asyncrpc.errors.BackwardFailedError) as caught:
            await backward(ctx, [bad, good], retain_graph=True)
        assert caught.value.worker == where
        assert type(error).__name__ in str(caught.value)
        assert str(error) in str(caught.value)
        assert isinstance(caught.value.__cause__, type(error))
        assert caught.value.context_id == str(ctx.id)
        assert_equal(await reports(keepers, ctx, x), before)
        await backward(ctx, good)
        after = await reports(keepers, ctx, x)
    for name, report in before.items():
        for once, twice in zip(report.gradients, after[name].gradients, strict=True):
            assert (once is None) == (twice is None)
            if once is not None:
                torch.testing.assert_close(2 * once, twice)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
async def test_failed_first_node_is_named(error: Exception) -> None:
    async with group_of(2) as (_, keepers), context() as ctx:
        x = leaf()
        y = await ask(keepers["b"], "times", x)
        with pytest.raises(asyncrpc.errors.BackwardFailedError) as caught:
            await backward(ctx, failing(y.sum(), error))
        assert caught.value.worker == "a"
        assert caught.value.__cause__ is error
        await backward(ctx, y.sum())
        assert x in get_gradients(ctx)


async def test_wrong_roots_and_gradients_are_refused_by_the_caller() -> None:
    wrong: list[tuple[Any, Any, str]] = [
        ([], None, "at least one root"),
        ([1.0], None, r"roots\[0\] must be a tensor.* float"),
        (leaf(), [None, None], "one tensor for each of the 1 roots, not 2"),
        (leaf(), [torch.ones(5).double()], r"\[0\] must have the shape of roots\[0\]"),
    ]
    async with group_of(2) as (_, keepers), context() as ctx:
        y = await ask(keepers["b"], "times", leaf())
        for roots, gradients, words in wrong:
            with pytest.raises(asyncrpc.UsageError, match=words):
                await backward(ctx, roots, gradients=gradients)
        with pytest.raises(asyncrpc.errors.NoGradientPathError):
            await backward(ctx, [torch.ones(())])
        await backward(ctx, y, gradients=[torch.ones_like(y)])


async def test_a_worker_that_ends_while_it_runs_is_named() -> None:
    async with group_of(3) as (workers, keepers), context() as ctx:
        x = leaf()
        good = await ask(keepers["b"], "times", x)
        y = await ask(keepers["c"], "slowly", good, "gate")
        with Gate("gate") as gate:
            running = asyncio.create_task(backward(ctx, y.sum(), retain_graph=True))
            await gate.reached.wait()
            lost = asyncio.create_task(workers[2].shutdown(drain_timeout_s=0))
            with pytest.raises(asyncrpc.errors.BackwardFailedError) as caught:
                await running
            gate.let_go()
            await lost
        assert caught.value.worker == "c"
        assert get_gradients(ctx) == {}
        assert (await ask(keepers["b"], "report")).gradients == [None, None]
        await backward(ctx, good.sum())
        assert x in get_gradients(ctx)


async def test_pass_without_a_needed_worker_changes_nothing() -> None:
    async with group_of(3) as (workers, keepers), context() as ctx:
        x = leaf()
        y = await ask(keepers["b"], "times", x)
        z = await ask(keepers["c"], "times", x)
        await workers[2].shutdown(drain_timeout_s=0)
        with pytest.raises(asyncrpc.errors.AutogradError):
            await backward(ctx, (y + z).sum(), retain_graph=True)
        assert get_gradients(ctx) == {}
        await backward(ctx, y.sum())
        assert (await ask(keepers["b"], "report")).gradients[0] is not None


@pytest.mark.parametrize("is_good", [True, False])
async def test_worker_asks_for_the_end_of_a_pass_it_missed(*, is_good: bool) -> None:
    """Word of the end goes by way of `b`, which is lost before it has passed it on."""
    async with group_of(3) as (workers, keepers), context() as ctx:
        _, b, c = workers
        x = leaf()
        y = await ask(keepers["b"], "relay", keepers["c"], "times", x)
        onward: Any = b.parts.service("autograd")
        onward._finish = lambda *_ids, **_how: None  # noqa: SLF001
        if is_good:
            await backward(ctx, y.sum(), retain_graph=True)
        else:
            await ask(keepers["b"], "relay", keepers["c"], "report")
            z = await ask(keepers["a"], "failing", x, ValueError("no"))
            with pytest.raises(asyncrpc.errors.BackwardFailedError):
                await backward(ctx, [y.sum(), z.sum()], retain_graph=True)
        passes: Any = c.parts.service("autograd").state(ctx.id).passes  # type: ignore[attr-defined]
        await b.shutdown(drain_timeout_s=0)
        async with asyncio.timeout(30):
            report = await ask(keepers["c"], "report")  # which waits for the end
        assert not passes
        assert (report.gradients[0] is not None) == is_good
        assert (x in get_gradients(ctx)) == is_good


# --- messages that no worker of ours would send, or not in that order ----------------


def advance(
    ids: list[int],
    asked: Sequence[Any] = (),
    keys: Sequence[Any] = (),
    gradients: Sequence[Any] = (),
) -> list[Any]:
    """Return a request to take part, with the graph kept."""
    fields = [*ids, "a", True, False, False, list(asked), list(keys), None, None, None]
    return [list(gradients), {"fields": fields}]


def ids_of(ctx: Context, worker: Worker, serial: int = 1 << 40) -> list[int]:
    """Return what names a pass that the worker might have begun."""
    return [*ctx.id, worker.incarnation, serial]


async def open_on_b(workers: list[Worker], k: Keepers) -> tuple[PeerLink, torch.Tensor]:
    """Bring the context to `b`; return the link there, and what has come from it."""
    y: torch.Tensor = await ask(k["b"], "times", leaf())
    return await workers[0].parts.link_to("b"), y


async def test_end_of_a_pass_may_overtake_its_requests() -> None:
    """The requests have payloads; the pass must not start after its end."""
    async with group_of(2) as (workers, keepers), context() as ctx:
        link, y = await open_on_b(workers, keepers)
        crossing = y.grad_fn.received.crossing  # type: ignore[union-attr]
        key = [crossing.message.serial, crossing.position]
        ids = ids_of(ctx, workers[0])
        raw_messages.tell(link, "autograd", "abort", ids)
        late = raw_messages.request(link, "autograd", "advance", advance(ids, key))
        with pytest.raises(asyncrpc.errors.AutogradError, match="aborted"):
            await late
        async with asyncio.timeout(30):
            await ask(keepers["b"], "report")  # which waits for passes to end


@pytest.mark.parametrize(
    ("method", "asked", "words"),
    [
        ("advance", [1 << 40, 0], "nothing was sent as"),
        ("close", None, "aborted"),
        ("unheard", None, "which this worker does not know"),
    ],
)
async def test_request_about_an_unknown_pass_is_refused(
    method: str, asked: list[Any] | None, words: str
) -> None:
    async with group_of(2) as (workers, keepers), context() as ctx:
        link, y = await open_on_b(workers, keepers)
        ids = ids_of(ctx, workers[0])
        value = ids if asked is None else advance(ids, asked)
        with pytest.raises(asyncrpc.RemoteError, match=words):
            await raw_messages.request(link, "autograd", method, value)
        raw_messages.tell(link, "autograd", "abort", ids)
        await backward(ctx, y.sum())
        assert (await ask(keepers["b"], "report")).gradients[0] is not None


async def test_a_step_from_a_worker_that_did_not_begin_the_pass_is_refused() -> None:
    async with group_of(2) as (workers, keepers), context() as ctx:
        link, y = await open_on_b(workers, keepers)
        ids = ids_of(ctx, workers[1])
        gradients, fields = advance(ids, [1 << 40, 0])
        fields["fields"][-2] = [1, *ctx.id, None, False, False, []]
        with pytest.raises(asyncrpc.RemoteError, match="may add a step"):
            await raw_messages.request(link, "autograd", "advance", [gradients, fields])
        await backward(ctx, y.sum())


async def test_repeated_gradient_is_refused() -> None:
    async with group_of(2) as (workers, keepers), context() as ctx:
        link, y = await open_on_b(workers, keepers)
        recv: Any = y.grad_fn
        crossing = recv.received.crossing
        key = [crossing.message.serial, crossing.position]
        ids = ids_of(ctx, workers[0])
        await raw_messages.request(link, "autograd", "advance", advance(ids, key))
        once = advance(ids, [], key, [torch.ones_like(y)])
        await raw_messages.request(link, "autograd", "advance", once)
        with pytest.raises(asyncrpc.RemoteError, match="which expects none"):
            await raw_messages.request(link, "autograd", "advance", once)
        raw_messages.tell(link, "autograd", "commit", ids)
        assert (await ask(keepers["b"], "report")).gradients[0] is not None


# --- torch's own backward ------------------------------------------------------------


def go_back_at_once(x: torch.Tensor) -> None:
    x.sum().backward()  # type: ignore[no-untyped-call]


async def test_plain_backward_that_needs_another_worker_is_refused() -> None:
    """The other worker would compute nothing."""
    said = "worker '.*'.*await asyncrpc.autograd.backward"
    async with group_of(2) as ((_, b), _), context() as ctx:
        x = torch.ones(3, requires_grad=True)
        with pytest.raises(asyncrpc.RemoteError, match=said):
            await asyncrpc.rpc_async(b.name, go_back_at_once, args=(x,))
        y: Any = await asyncrpc.rpc_async(b.name, torch.sin, args=(x,))
        with pytest.raises(asyncrpc.errors.AutogradError, match=said):
            y.sum().backward()
        with pytest.raises(RuntimeError, match=said):  # as torch's own does
            torch.autograd.backward([y.sum()])
        await backward(ctx, y.sum())
        assert torch.equal(get_gradients(ctx)[x], torch.ones(3).cos())


async def test_plain_backward_works_without_other_workers() -> None:
    async with group_of(2) as ((_, b), _), context():
        x, w = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
        y: Any = await asyncrpc.rpc_async(b.name, torch.sin, args=(x,))
        (y.detach() * w).sum().backward()
        assert torch.equal(w.grad, y)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad((y * w).sum(), y)
        assert torch.equal(gradient, w)
