"""Hooks and backward functions of the user's that raise where a backward pass comes.

Whoever began the pass hears what was raised, and on which worker; nothing is left of
the pass on any of them, and the next one goes well.
"""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
import torch

from asyncrpc import Options, Worker
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.errors import BackwardFailedError
from asyncrpc.testing import Cluster, acting_as
from tests.integration.core import misbehaving
from tests.integration.core import wrong_graphs as graphs
from tests.integration.core.company import LIMIT_S, PATIENT, company, work
from tests.integration.core.groups import processes, until
from tests.integration.core.wrong_graphs import RAISING

OPTIONS: Final = Options(drain_timeout_s=2.0, liveness=PATIENT)
NAMES: Final = {"sys.exit": "SystemExit", "endless recursion": "RecursionError"}
# Who runs a hook has no call, and so no worker that it could ask for.
RAISED: Final = [kind for kind in misbehaving.RAISED if kind != "worker inside"]
# Of what says that it is a tensor and is none torch takes the memory for one's.
GIVEN: Final = ["text", "number", "deep", "emptied tensor", "meta tensor"]
EXITS: Final = {"exit", "interrupt", "base", "sys.exit"}
FEW: Final = ["value", "exit", "base", "cancelled", "exiting", "protocol", "text"]

Make = Callable[[torch.Tensor, str], Awaitable[torch.Tensor]]


def at(worker: Worker, to: str, name: str) -> Make:
    """Return what has another worker compute something that misbehaves."""

    async def make(x: torch.Tensor, kind: str) -> torch.Tensor:
        result: torch.Tensor = await worker.peer(to).call(RAISING[name], x, kind)
        return result

    return make


def through(worker: Worker, by: str, to: str, name: str) -> Make:
    async def make(x: torch.Tensor, kind: str) -> torch.Tensor:
        peer = worker.peer(by)
        result: torch.Tensor = await peer.call(graphs.through, to, name, x, kind)
        return result

    return make


async def goes_well(worker: Worker) -> None:
    """A pass through the same workers comes to what it should."""
    leaf = torch.ones(2, 3, requires_grad=True)
    async with context() as ctx:
        await backward(ctx, [(await worker.peer("b").call(graphs.well, leaf)).sum()])
        assert torch.equal(get_gradients(ctx)[leaf], torch.full((2, 3), 2.0))


async def raised_by(make: Make, kind: str) -> BaseException:
    """Return what the pass raises; nothing has been gathered then."""
    leaf = torch.ones(2, 3, requires_grad=True)
    async with asyncio.timeout(LIMIT_S), context() as ctx:
        out = await make(leaf * 1, kind)
        with pytest.raises(BaseException) as caught:  # noqa: PT011  (whatever it is)
            await backward(ctx, [out.sum()])
        assert get_gradients(ctx) == {}
    return caught.value


def is_told(error: BaseException, where: str, kind: str) -> None:
    """The error says on which worker it was, and what was raised."""
    assert isinstance(error, BackwardFailedError), (kind, error)
    assert error.worker == where, (kind, error)
    assert f"Error on worker {where!r}: " in str(error), (kind, error)
    if kind in RAISED:
        name = NAMES.get(kind, "ValueError")
        if kind in misbehaving.ERRORS and "inside" not in kind:
            name = type(misbehaving.ERRORS[kind]()).__name__
        assert name in str(error), (kind, error)


@pytest.mark.parametrize("name", RAISING)
async def test_graph_that_raises_fails_its_pass_alone(name: str) -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        with acting_as(a):
            for kind in [*RAISED, *GIVEN]:
                for _ in range(2):
                    is_told(await raised_by(at(a, "b", name), kind), "b", kind)
            await goes_well(a)


@pytest.mark.parametrize("name", ["function", "tensor hook", "accumulating hook"])
async def test_failing_worker_of_several_is_named(name: str) -> None:
    async with Cluster(3, network="uds", options=OPTIONS) as (a, *_), company(a):
        with acting_as(a):
            for kind in FEW:
                for to in ("c", "a"):
                    error = await raised_by(through(a, "b", to, name), kind)
                    if to == "c":
                        is_told(error, "c", kind)
            await goes_well(a)


@pytest.mark.parametrize("name", RAISING)
async def test_local_hook_that_raises_fails_the_pass(name: str) -> None:
    """Exceptions that end a program are raised unchanged, as by torch."""

    async def here(x: torch.Tensor, kind: str) -> torch.Tensor:
        return RAISING[name](await a.peer("b").call(graphs.double, x), kind)

    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        with acting_as(a):
            for kind in [*RAISED, *GIVEN]:
                error = await raised_by(here, kind)
                is_exit = not isinstance(error, BackwardFailedError)
                if kind in EXITS or (kind == "generator exit" and is_exit):
                    assert type(error) is type(misbehaving_error(kind)), error
                else:
                    is_told(error, "a", kind)
            await goes_well(a)


def misbehaving_error(kind: str) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011  (whatever it is)
        misbehaving.misraise(kind)
    return caught.value


async def test_training_survives_graphs_that_raise() -> None:
    async with Cluster(2, network="tcp", options=OPTIONS) as (a, _), work(a):
        with acting_as(a):
            for name in RAISING:
                for kind in FEW:
                    is_told(await raised_by(at(a, "b", name), kind), "b", kind)


async def test_graph_that_raises_fails_across_processes() -> None:
    async with processes("b", options=OPTIONS) as a, company(a), work(a):
        with acting_as(a):
            for name in RAISING:
                for kind in FEW:
                    is_told(await raised_by(at(a, "b", name), kind), "b", kind)
            await goes_well(a)


@pytest.mark.parametrize("where", ["a", "b"])
async def test_failed_pass_leaves_no_reference_cycles(where: str) -> None:
    """Gradients may be large: they are freed with the error, on both workers."""
    async with Cluster(2, options=OPTIONS) as (a, _), company(a):
        with acting_as(a):
            gc.collect()
            gc.disable()
            try:
                kept = await failed(a, where)
                for _ in range(2):  # word of the end has come, and is taken
                    await a.peer("b").call(len, "")
                # A thread that has just run a part of it may still hold it.
                await until(lambda: all(reference() is None for reference in kept))
            finally:
                gc.enable()


async def failed(a: Worker, where: str) -> list[weakref.ref[Any]]:
    """Return what a pass held that has failed on a worker."""
    leaf = torch.ones(2, 3, requires_grad=True)
    async with context() as ctx:
        inside = leaf * 1
        out = await at(a, "b", "tensor hook")(
            inside, "value" if where == "b" else "none"
        )
        if where == "a":
            out = graphs.by_tensor_hook(out, "value")
        with pytest.raises(BackwardFailedError):
            await backward(ctx, [out.sum()])
        inner_refs, graphs.inner_refs[:] = graphs.inner_refs[:], []
        return [*inner_refs, *(weakref.ref(tensor) for tensor in (leaf, inside, out))]
