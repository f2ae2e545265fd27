"""Collectives by messages over links: schedules of `machine.schedules`, played.

For ranks on several hosts, in one process, or where memory cannot be shared.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from asyncrpc.parallel.collectives.machine import schedules
from asyncrpc.parallel.collectives.machine.schedules import Schedule, StepKind
from asyncrpc.parallel.collectives.matching import CollectiveRun
from asyncrpc.parallel.collectives.reductions import Reduction
from asyncrpc.parallel.collectives.tensors import split, text

# From here on a ring is faster than a tree, which moves all of the tensor log2(n)
# times; below, its n - 1 rounds cost more than that.  Measured with a network of 1
# Gbit/s for each of 2, 3 and 4 ranks (all on two cores, which overrates what a message
# costs): a ring takes 1.4 to 2.3 times as long as a tree at 64 KiB, 0.8 to 1.5 at 1
# MiB, 0.6 to 1.3 at 4 MiB, 0.5 to 0.7 at 16 MiB.  On loopback, where cores are scarce,
# it takes 1 to 2 times as long at 1 MiB, and as long at 64 MiB.
RING_BYTES_MIN: Final = 1 << 20
IN_THREAD_BYTES_MIN: Final = 256 << 10  # combining takes longer than a hop to a thread


class MessagePath:
    """The collectives of one group over links."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    async def empty(self, run: CollectiveRun, nbytes: int) -> torch.Tensor:
        """Return memory of this rank: uint8, (nbytes,)."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    async def barrier(self, run: CollectiveRun) -> None:
        """Wait for all ranks."""
        await play(run, schedules.barrier(self._rank, self._size), [], [])

    async def all_reduce(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction
    ) -> None:
        """Reduce a flat tensor in place, at all ranks."""
        rank, size = self._rank, self._size
        if is_large(flat):
            blocks = split(flat, size)
            plan = schedules.ring_reduce_scatter(rank, size)
            await play(run, plan, blocks, by=by, is_last=False)
            by.finish(blocks[rank], size)
            await play(run, schedules.ring_all_gather(rank, size), blocks)
            return
        plan = schedules.tree_reduce(rank, size, 0)
        await play(run, plan, [flat], by=by, is_last=False)
        if rank == 0:
            by.finish(flat, size)
        await play(run, schedules.tree_broadcast(rank, size, 0), [flat])

    async def reduce(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction, root: int
    ) -> None:
        """Reduce a flat tensor in place at `root`; elsewhere it stays as it is."""
        rank, size = self._rank, self._size
        if rank != root:
            flat = flat.clone()
        if is_large(flat):
            blocks = split(flat, size)
            await play(run, schedules.ring_reduce(rank, size, root), blocks, by=by)
        else:
            await play(run, schedules.tree_reduce(rank, size, root), [flat], by=by)
        if rank == root:
            by.finish(flat, size)

    async def reduce_scatter(
        self, run: CollectiveRun, parts: list[torch.Tensor], by: Reduction
    ) -> torch.Tensor:
        """Return part `rank` of the flat parts, reduced over all ranks."""
        rank, size = self._rank, self._size
        parts = [part.clone() for part in parts]
        large = sum(part.nbytes for part in parts) >= RING_BYTES_MIN
        plan = schedules.ring_reduce_scatter if large else schedules.tree_reduce_scatter
        await play(run, plan(rank, size), parts, by=by)
        by.finish(parts[rank], size)
        return parts[rank]

    async def broadcast(
        self, run: CollectiveRun, flat: torch.Tensor, root: int
    ) -> None:
        """Fill a flat tensor with that of `root`."""
        rank, size = self._rank, self._size
        if is_large(flat):
            blocks = split(flat, size)
            await play(run, schedules.ring_broadcast(rank, size, root), blocks)
        else:
            await play(run, schedules.tree_broadcast(rank, size, root), [flat])

    async def all_gather(
        self, run: CollectiveRun, mine: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks, whose shapes may differ."""
        return await self._gather(run, mine, schedules.tree_all_gather)

    async def gather(
        self, run: CollectiveRun, mine: torch.Tensor, root: int
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks at `root`; elsewhere they are undefined."""
        plan = functools.partial(schedules.star_gather, root=root)
        return await self._gather(run, mine, plan)

    async def _gather(
        self,
        run: CollectiveRun,
        mine: torch.Tensor,
        plan: Callable[[int, int], Schedule],
    ) -> list[torch.Tensor]:
        # One plan for all sizes: this rank does not know those of other ranks.
        tensors = [mine] * self._size
        await play(run, plan(self._rank, self._size), tensors, adopt=True)
        return tensors

    async def scatter(
        self, run: CollectiveRun, parts: list[torch.Tensor] | None, root: int
    ) -> torch.Tensor:
        """Return this rank's part of the tensors that `root` gives."""
        tensors = (
            parts or [torch.empty(0, dtype=torch.uint8, device="cpu")] * self._size
        )
        plan = schedules.star_scatter(self._rank, self._size, root)
        await play(run, plan, tensors, adopt=True)
        return tensors[self._rank]

    async def all_to_all(
        self, run: CollectiveRun, parts: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the part for this rank of every rank."""
        received = list(parts)
        plan = schedules.all_to_all(self._rank, self._size)
        await play(run, plan, parts, received, adopt=True)
        return received


async def play(
    run: CollectiveRun,
    plan: Schedule,
    blocks: list[torch.Tensor],
    into: list[torch.Tensor] | None = None,
    *,
    by: Reduction | None = None,
    adopt: bool = False,
    is_last: bool = True,
) -> None:
    """Carry out the steps of a schedule.

    Args:
        into: the blocks that received tensors fill; None: `blocks`.
        is_last: whether to wait until all sent blocks have been taken; needless where
            another schedule follows and the two are safe as one.
    """
    kept = blocks if into is None else into
    for step in plan:
        if step.kind is StepKind.SEND:
            await run.send(step.peer, [blocks[block] for block in step.blocks])
            continue
        came = await run.take(step.peer)
        if len(came) != len(step.blocks):
            raise run.refuse(
                step.peer, f"sent {len(came)} blocks instead of {len(step.blocks)}"
            )
        for block, tensor in zip(step.blocks, came, strict=True):
            if adopt:
                kept[block] = tensor
                continue
            if tensor.shape != kept[block].shape or tensor.dtype != kept[block].dtype:
                raise run.refuse(
                    step.peer, f"sent {text(tensor)} instead of {text(kept[block])}"
                )
            if step.kind is StepKind.KEEP:
                await aside(run, kept[block].copy_, tensor)
            else:
                assert by is not None
                mine = by.piece(kept[block])
                await aside(run, by.combine, mine, by.piece(tensor), mine)
    if is_last:
        await run.settle()


async def aside(run: CollectiveRun, job: Callable[..., object], *tensors: Any) -> None:
    """Run a job on tensors, in a thread if they are large."""
    if tensors[0].nbytes < IN_THREAD_BYTES_MIN:
        job(*tensors)
    else:
        await run.matching.worker.run_on_host(lambda: job(*tensors))


def is_large(tensor: torch.Tensor) -> bool:
    """Return whether rings are better than trees for a tensor."""
    return tensor.nbytes >= RING_BYTES_MIN
