"""Many groups at a time, one after the other, and what is left of them."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import torch

import asyncrpc
from asyncrpc import Group, Options, UsageError
from asyncrpc.core.payloads import regions
from asyncrpc.testing import Cluster, ProcessCluster, acting_as

NAMES = ("asyncrpc-board", "asyncrpc-group")  # of the memory that groups share
OPTIONS = Options(drain_timeout_s=0.5)


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with Cluster(3, options=OPTIONS) as workers:
        yield [Group(worker, timeout_s=60.0) for worker in workers]


class TestDuplicates:
    async def test_collectives_of_duplicates_are_matched_separately(
        self, groups: list[Group]
    ) -> None:
        """Each rank begins the collectives of the two groups in its own order."""

        async def both(mine: Group, other: Group, *, other_first: bool) -> list[float]:
            ours, theirs = torch.ones(5), torch.full((70,), 2.0)
            calls = [mine.all_reduce(ours), other.all_reduce(theirs, "max")]
            if other_first:
                calls.reverse()
            await asyncio.gather(*calls)
            return [ours[0].item(), theirs[0].item()]

        others = [group.duplicate() for group in groups]
        assert {(group.rank, group.size) for group in others} == {
            (0, 3),
            (1, 3),
            (2, 3),
        }
        results = await asyncio.gather(
            *(
                both(mine, other, other_first=mine.rank == 1)
                for mine, other in zip(groups, others, strict=True)
            )
        )
        assert results == [[3.0, 2.0]] * 3

    async def test_duplicate_fails_without_its_original(
        self, groups: list[Group]
    ) -> None:
        others = [group.duplicate() for group in groups]
        others[0].refuse("has no time")
        errors = await asyncio.gather(
            *(group.barrier() for group in others[1:]), return_exceptions=True
        )
        assert all("rank 0 ('a') has no time" in str(error) for error in errors)
        for group in others:
            group.close()
        await asyncio.gather(*(group.barrier() for group in groups))

    async def test_refused_group_closes_without_unhandled_errors(
        self, groups: list[Group]
    ) -> None:
        """No task awaits the opening, which fails."""
        unhandled: list[dict[str, object]] = []
        asyncio.get_running_loop().set_exception_handler(
            lambda _, context: unhandled.append(context)
        )
        before = asyncio.all_tasks()
        group = groups[0].duplicate()
        group.refuse("has no time")
        opening = asyncio.all_tasks() - before
        assert opening
        group.close()
        await asyncio.wait(opening)
        del group, opening
        gc.collect()
        assert not unhandled

    async def test_group_names_are_unique_while_open(self, groups: list[Group]) -> None:
        """A group without a name gets one."""
        group = groups[0]
        names = [group.duplicate().name for _ in range(3)]
        assert len(set(names)) == 3
        named = group.duplicate(name="of a library")
        with pytest.raises(UsageError, match=r"of a library.* is already open"):
            group.duplicate(name="of a library")
        named.close()
        group.duplicate(name="of a library").close()

    async def test_duplicate_of_a_duplicate_works(self, groups: list[Group]) -> None:
        again = [group.duplicate().duplicate() for group in groups]
        await asyncio.gather(*(group.barrier() for group in again))
        assert again[0].timeout_s == groups[0].timeout_s


def shared_bytes() -> int:
    """Return how much memory of groups this process has mapped."""
    total = 0
    for line in Path("/proc/self/maps").read_text("ascii").splitlines():
        if any(name in line for name in NAMES):
            low, high = (int(end, 16) for end in line.split()[0].split("-"))
            total += high - low
    return total


async def wait_shared_bytes(wanted: int) -> None:
    """Wait until no more than so much is left."""
    async with asyncio.timeout(20.0):
        while shared_bytes() > wanted:  # noqa: ASYNC110  the kernel's map has no event
            await asyncio.sleep(0.01)


async def open_and_close(count: int, numel: int) -> bool:
    """Use groups one after the other; say whether a tensor outlives its group."""
    patience_s, regions.IDLE_S = regions.IDLE_S, 0.02  # type: ignore[misc]
    worker = asyncrpc.current_worker()
    for _ in range(count):
        group = Group(worker, timeout_s=60.0)
        kept = await group.empty(numel)
        kept.fill_(group.rank + 1.0)
        await group.all_reduce(kept)
        assert shared_bytes() >= 2 * kept.nbytes
        group.close()
        # Not the board, nor what the other rank has.
        await wait_shared_bytes(kept.nbytes)
    is_whole = bool((kept == 3.0).all())
    del kept
    await wait_shared_bytes(0)
    regions.IDLE_S = patience_s  # type: ignore[misc]
    return is_whole


async def test_closed_groups_leave_no_memory() -> None:
    """Neither a board nor other memory outlives the group and its tensors."""
    async with ProcessCluster(["b"], method="forkserver") as worker:
        with acting_as(worker):
            b = worker.peer("b")
            both = asyncio.gather(
                open_and_close(5, 1 << 20), b.call(open_and_close, 5, 1 << 20)
            )
            assert all(await both)
