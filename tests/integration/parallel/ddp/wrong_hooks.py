"""Communication hooks that raise, or return what they should not.

The functions of this module run at every rank, as functions that are called: so even
what ends a program ends the call alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

import asyncrpc
from asyncrpc import Group
from asyncrpc.ddp import DistributedDataParallel, GradBucket
from asyncrpc.errors import CollectiveError
from tests.integration.core.misbehaving import give
from tests.integration.parallel.ddp.ranks import (
    Mlp,
    grads_of,
    loss_of,
    mean_grads,
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
    found = await mean(group, bucket)
    return give(rank.kind) if rank.kind else found


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
    one.__name__: one
    for one in (
        in_coroutine,
        after_a_collective,
        in_second_bucket,
        in_thread,
        by_awaitable,
        by_torch_future,
    )
}
OTHERS: Final[dict[str, Way]] = {
    one.__name__: one
    for one in (in_another_group, by_cancelled_future, by_cancelling_itself)
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
    return any(one.grad is not None for one in _here().model.parameters())


async def reduce() -> float:
    """Use the group that the module was made over."""
    found = await _here().group.all_reduce(torch.ones(3))
    return float(found[0])


@asyncrpc.on_loop
def end_model() -> None:
    _here().model.close()


@asyncrpc.on_loop
def end() -> None:
    rank = _ranks.pop(asyncrpc.current_worker().incarnation)
    rank.model.close()
    rank.group.close()
