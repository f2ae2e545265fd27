"""A communication hook that raises, or gives what it should not, fails a pass for all.

Each rank hears in bounded time: the one whose hook it was, what was raised, the others
who it was.  The workers live, other work between them goes on, nothing is left; the
next pass of the module goes well, and so does a module made anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch

import asyncrpc
from asyncrpc import Group, Options, RemoteError, Worker
from asyncrpc.ddp import DistributedDataParallel, GradBucket
from asyncrpc.errors import CollectiveError
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.core import misbehaving
from tests.integration.core.company import PATIENT, company, work
from tests.integration.core.misbehaving import give
from tests.integration.parallel.ddp.ranks import (
    Mlp,
    grads_of,
    loss_of,
    mean_grads,
    outcomes,
    rows,
    same,
)

LIMIT_S: Final = 60.0  # only what hangs reaches it


@dataclass
class Rank:
    """What one worker trains.

    Attributes:
        group: that its modules are made over.
        model: the one of now.
        kind: what the hook is to give or to raise; empty: what it should.
    """

    group: Group
    model: DistributedDataParallel
    kind: str = ""


_ranks: Final[dict[int, Rank]] = {}


def _here() -> Rank:
    return _ranks[asyncrpc.current_worker().incarnation]


async def mean(group: Group, bucket: GradBucket) -> torch.Tensor:
    return await group.all_reduce(bucket.buffer(), "avg")


# --- hooks ---------------------------------------------------------------------------


async def in_coroutine(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    return give(rank.kind) if rank.kind else await mean(group, bucket)


async def after_a_collective(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    reduced = await mean(group, bucket)
    return give(rank.kind) if rank.kind else reduced


async def in_second_bucket(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    is_it = rank.kind and bucket.index() == 1
    return give(rank.kind) if is_it else await mean(group, bucket)


def in_thread(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    return give(rank.kind) if rank.kind else mean(group, bucket)


def by_awaitable(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    return in_coroutine(rank, group, bucket)


def by_torch_future(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    if not rank.kind:
        return mean(group, bucket)
    future: torch.futures.Future[Any] = torch.futures.Future()
    try:
        future.set_result(give(rank.kind))
    except Exception as error:  # noqa: BLE001  (torch takes no others)
        future.set_exception(error)
    return future


async def in_another_group(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    """Fail as a collective of another group does."""
    if rank.kind:
        raise CollectiveError("a collective of another group has failed")
    return await mean(group, bucket)


async def by_cancelled_future(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    if rank.kind:
        never: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(never.cancel)
        return await never
    return await mean(group, bucket)


async def by_cancelling_itself(rank: Rank, group: Group, bucket: GradBucket) -> Any:
    if rank.kind:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
    return await mean(group, bucket)


Way = Callable[[Rank, Group, GradBucket], Any]
WAYS: Final[dict[str, Way]] = {
    way.__name__: way
    for way in (
        in_coroutine,
        after_a_collective,
        in_second_bucket,
        in_thread,
        by_awaitable,
        by_torch_future,
    )
}
OTHERS: Final[dict[str, Way]] = {
    way.__name__: way
    for way in (in_another_group, by_cancelled_future, by_cancelling_itself)
}


def _hook_of(rank: Rank, name: str) -> Any:
    way = (WAYS | OTHERS)[name]
    if not asyncio.iscoroutinefunction(way):
        return lambda group, bucket: way(rank, group, bucket)

    async def hook(group: Group, bucket: GradBucket) -> Any:
        return await way(rank, group, bucket)

    return hook


# --- what ranks are asked for --------------------------------------------------------

BUCKET_MB: Final = 1e-4  # one parameter each


async def begin(members: Sequence[str], way: str) -> None:
    """Make a module of which a hook of this kind reduces the gradients."""
    worker = asyncrpc.current_worker()
    known = _ranks.get(worker.incarnation)
    group = (
        known.group
        if known
        else Group(worker, list(members), name="hooks", timeout_s=LIMIT_S)
    )
    model = await DistributedDataParallel(
        Mlp(), group, bucket_cap_mb=BUCKET_MB, first_bucket_cap_mb=BUCKET_MB
    )
    rank = _ranks[worker.incarnation] = Rank(group, model)
    model.register_comm_hook(None, _hook_of(rank, way))


async def step(kind: str, *, is_plain: bool = False) -> bool:
    """Train once; say whether the gradients came to what they should."""
    rank = _here()
    rank.kind = kind
    rank.model.zero_grad()
    loss = loss_of(rank.model(rows(rank.group.rank)))
    if is_plain:
        await asyncio.to_thread(loss.backward)
    else:
        await rank.model.backward(loss)
    return same(grads_of(rank.model), mean_grads(Mlp, rank.group.size))


async def has_gradients() -> bool:
    return any(parameter.grad is not None for parameter in _here().model.parameters())


async def reduce() -> float:
    """Use the group that the module was made over."""
    total = await _here().group.all_reduce(torch.ones(3))
    return float(total[0])


@asyncrpc.on_loop
def end_model() -> None:
    _here().model.close()


@asyncrpc.on_loop
def end() -> None:
    rank = _ranks.pop(asyncrpc.current_worker().incarnation)
    rank.model.close()
    rank.group.close()


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
    members = sorted(known_member.name for known_member in a.known_members)
    async with asyncio.timeout(LIMIT_S):
        return await outcomes(
            *(a.peer(name).call(function, *args, **kwargs) for name in members)
        )


@asynccontextmanager
async def ranks(a: Worker, way: str) -> AsyncIterator[None]:
    """Train with a hook of this kind at every rank."""
    members = sorted(known_member.name for known_member in a.known_members)
    assert await everywhere(a, begin, members, way) == [None] * len(members)
    try:
        yield
    finally:
        await everywhere(a, end)


async def steps(a: Worker, kinds: Sequence[str], **how: Any) -> list[Any]:
    """Train once, with a hook that does this at each rank."""
    async with asyncio.timeout(LIMIT_S):
        return await outcomes(
            *(a.peer(rank).call(step, kind, **how) for rank, kind in enumerate(kinds))
        )


def is_heard(errors: list[Any], kind: str) -> None:
    """Rank 1 is told what its hook raised; the others who it was."""
    own, others = errors[1], [errors[0], *errors[2:]]
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
        own_kinds = ["", kind, *[""] * (size - 2)]
        is_heard(await steps(a, own_kinds, **how), kind)
        assert await everywhere(a, has_gradients) == [False] * size
        assert await everywhere(a, reduce) == [float(size)] * size
        assert await steps(a, [""] * size, **how) == [True] * size


@pytest.mark.parametrize("way", WAYS)
async def test_wrong_hook_fails_on_every_rank_and_nothing_else(way: str) -> None:
    async with Cluster(3, options=OPTIONS) as (a, *_), company(a), ranks(a, way):
        raised = set(misbehaving.RAISED) - {"worker inside"}  # of a call alone
        if way == "by_torch_future":
            raised -= NOT_OF_TORCH
        await misuse(a, [*sorted(raised), *WRONG])


@pytest.mark.parametrize("way", OTHERS)
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
            assert await everywhere(a, end_model) == [None] * 3
            members = ["a", "b", "c"]
            begun = await everywhere(a, begin, members, "in_thread")
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
        for way in WAYS:
            async with ranks(a, way):
                await misuse(a, ["value", "exit", "exiting", "exit inside", "text"])
