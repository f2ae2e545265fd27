"""A communication hook that raises, or gives what it should not, fails a pass for all.

Each rank hears in bounded time: the one whose hook it was, what was raised, the others
who it was.  The workers live, other work between them goes on, nothing is left; the
next pass of the module goes well, and so does a module made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import pytest

from asyncrpc import Options, RemoteError, Worker
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.core import misbehaving
from tests.integration.core.company import PATIENT, company, work
from tests.integration.parallel.ddp import wrong_hooks as hooks
from tests.integration.parallel.ddp.ranks import outcomes
from tests.integration.parallel.ddp.wrong_hooks import LIMIT_S

OPTIONS: Final = Options(drain_timeout_s=2.0, liveness=PATIENT)
NAMES: Final = {"sys.exit": "SystemExit", "endless recursion": "RecursionError"}
WRONG: Final = [
    *("none", "text", "number", "empty storage", "meta tensor", "nonsense sparse"),
    *("raising tensor", "emptied tensor", "pretends tensor", "pretends awaitable"),
    *("bad class", "exiting class", "bad getattr", "plain generator", "foreign future"),
]
# Of what torch's futures do not take they make an error of their own.
NOT_OF_TORCH: Final = {"cancelled", "exit", "interrupt", "generator exit", "base"}


async def everywhere(a: Worker, function: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """Call a function at every rank, a among them; return what comes of each."""
    members = sorted(one.name for one in a.known_members)
    async with asyncio.timeout(LIMIT_S):
        return await outcomes(
            *(a.peer(name).call(function, *args, **kwargs) for name in members)
        )


@asynccontextmanager
async def ranks(a: Worker, way: str) -> AsyncIterator[None]:
    """Train with a hook of this kind at every rank."""
    members = sorted(one.name for one in a.known_members)
    assert await everywhere(a, hooks.begin, members, way) == [None] * len(members)
    try:
        yield
    finally:
        await everywhere(a, hooks.end)


async def steps(a: Worker, kinds: Sequence[str], **how: Any) -> list[Any]:
    """Train once, with a hook that does this at each rank."""
    async with asyncio.timeout(LIMIT_S):
        return await outcomes(
            *(
                a.peer(rank).call(hooks.step, kind, **how)
                for rank, kind in enumerate(kinds)
            )
        )


def is_heard(found: list[Any], kind: str) -> None:
    """Rank 1 is told what its hook raised; the others who it was."""
    own, others = found[1], [found[0], *found[2:]]
    assert isinstance(own, RemoteError), (kind, own)
    name = NAMES.get(kind, kind)
    if kind in misbehaving.ERRORS:
        name = type(misbehaving.ERRORS[kind]()).__name__
    for error in others:
        assert isinstance(error, CollectiveError), (kind, error)
        said = str(error)
        assert "rank 1 ('b') failed in its communication hook" in said, (kind, error)
        if kind in misbehaving.RAISED:
            assert name in said, (kind, error)


async def misuse(a: Worker, kinds: Sequence[str], **how: Any) -> None:
    """Have the hook of rank 1 do so; each pass afterwards goes well."""
    size = len(a.known_members)
    for kind in kinds:
        given = ["", kind, *[""] * (size - 2)]
        is_heard(await steps(a, given, **how), kind)
        assert await everywhere(a, hooks.has_gradients) == [False] * size
        assert await everywhere(a, hooks.reduce) == [float(size)] * size
        assert await steps(a, [""] * size, **how) == [True] * size


@pytest.mark.parametrize("way", hooks.WAYS)
async def test_wrong_hook_fails_on_every_rank_and_nothing_else(way: str) -> None:
    async with Cluster(3, options=OPTIONS) as (a, *_), company(a), ranks(a, way):
        raised = set(misbehaving.RAISED) - {"worker inside"}  # of a call alone
        if way == "by_torch_future":
            raised -= NOT_OF_TORCH
        await misuse(a, [*sorted(raised), *WRONG])


@pytest.mark.parametrize("way", hooks.OTHERS)
async def test_hook_that_waits_forever_is_named(way: str) -> None:
    async with Cluster(3, options=OPTIONS) as (a, *_), company(a), ranks(a, way):
        errors = await steps(a, ["", "wrong", ""])
        assert isinstance(errors[1], CollectiveError), errors
        assert isinstance(errors[1], RemoteError), errors
        for error in (errors[0], errors[2]):
            assert isinstance(error, CollectiveError), error
            assert "rank 1 ('b')" in str(error)
        assert await steps(a, ["", "", ""]) == [True] * 3


async def test_hook_that_fails_on_every_rank_ends_the_pass() -> None:
    async with (
        Cluster(3, options=OPTIONS) as (a, *_),
        company(a),
        ranks(a, "after_a_collective"),
    ):
        for kind in ("value", "exit", "exiting", "text"):
            for error in await steps(a, [kind] * 3):
                assert isinstance(error, RemoteError | CollectiveError), error
            assert await steps(a, [""] * 3) == [True] * 3


@pytest.mark.parametrize("way", ["in_coroutine", "in_thread"])
async def test_wrong_hook_fails_a_plain_pass(way: str) -> None:
    async with Cluster(2, options=OPTIONS) as (a, _), company(a), ranks(a, way):
        kinds = ["value", "exit", "generator exit", "exiting", "cancelled", "text"]
        await misuse(a, kinds, is_plain=True)


async def test_new_module_trains_after_a_wrong_hook() -> None:
    async with (
        Cluster(3, options=OPTIONS) as (a, *_),
        company(a),
        ranks(a, "in_coroutine"),
    ):
        for kind in ("value", "exit", "exiting"):
            is_heard(await steps(a, ["", kind, ""]), kind)
            assert await everywhere(a, hooks.end_model) == [None] * 3
            members = ["a", "b", "c"]
            begun = await everywhere(a, hooks.begin, members, "in_thread")
            assert begun == [None] * 3
            assert await steps(a, [""] * 3) == [True] * 3


@pytest.mark.parametrize("others", [["b"], ["b", "c"]])
async def test_wrong_hook_fails_across_processes(others: list[str]) -> None:
    async with AsyncExitStack() as stack:
        a = await stack.enter_async_context(
            ProcessCluster(others, options=OPTIONS, method="forkserver")
        )
        await stack.enter_async_context(company(a))
        if len(others) == 1:  # it takes all workers for its own
            await stack.enter_async_context(work(a))
        for way in hooks.WAYS:
            async with ranks(a, way):
                await misuse(a, ["value", "exit", "exiting", "exit inside", "text"])
