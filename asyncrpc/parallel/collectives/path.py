"""The path of a group's collectives: through shared memory, or by messages.

All ranks agree on it once, by messages, when the first collective begins: they tell
each other where they run; on one host rank 0 makes the board, and passes it on.
"""

from __future__ import annotations

import hashlib
import os
from typing import Final, Protocol

import torch

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.transport.address import Address
from asyncrpc.parallel.collectives import board
from asyncrpc.parallel.collectives.machine import schedules
from asyncrpc.parallel.collectives.matching import CollectiveRun
from asyncrpc.parallel.collectives.message_path import MessagePath, play
from asyncrpc.parallel.collectives.reductions import Reduction
from asyncrpc.parallel.collectives.shared import SharedPath, shared_bytes

_WORD_BYTES: Final = 8


class Path(Protocol):
    """The collectives of one group, on tensors that are contiguous and checked."""

    async def empty(self, run: CollectiveRun, nbytes: int) -> torch.Tensor:
        """Return memory where collectives are fastest: uint8, (nbytes,)."""

    async def barrier(self, run: CollectiveRun) -> None:
        """Wait for all ranks."""

    async def all_reduce(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction
    ) -> None:
        """Reduce a flat tensor in place, at all ranks."""

    async def reduce(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction, root: int
    ) -> None:
        """Reduce a flat tensor in place at `root`; elsewhere it stays as it is."""

    async def reduce_scatter(
        self, run: CollectiveRun, parts: list[torch.Tensor], by: Reduction
    ) -> torch.Tensor:
        """Return part `rank` of the flat parts, reduced over all ranks."""

    async def broadcast(
        self, run: CollectiveRun, flat: torch.Tensor, root: int
    ) -> None:
        """Fill a flat tensor with that of `root`."""

    async def all_gather(
        self, run: CollectiveRun, mine: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks, whose shapes may differ."""

    async def gather(
        self, run: CollectiveRun, mine: torch.Tensor, root: int
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks at `root`; elsewhere they are undefined."""

    async def scatter(
        self, run: CollectiveRun, parts: list[torch.Tensor] | None, root: int
    ) -> torch.Tensor:
        """Return this rank's part of the tensors that `root` gives."""

    async def all_to_all(
        self, run: CollectiveRun, parts: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the part for this rank of every rank."""


async def open_path(run: CollectiveRun) -> Path:
    """Agree with all ranks on the path."""
    matching = run.matching
    rank, size = matching.rank, len(matching.members)
    by_messages = MessagePath(rank, size)
    if size == 1:
        return by_messages
    memory = _board_memory(size) if rank == 0 and _is_willing(run) else None
    is_willing = memory is not None if rank == 0 else _is_willing(run)
    mine = torch.tensor([is_willing, _host_number(), os.getpid()], device="cpu")
    answers = [row.tolist() for row in await by_messages.all_gather(run, mine)]
    willing, hosts, pids = zip(*answers, strict=True)
    if not all(willing) or len(set(hosts)) > 1 or len(set(pids)) < size:
        return by_messages
    memories = [
        torch.empty(0, dtype=torch.uint8, device="cpu") if memory is None else memory
    ]
    await play(run, schedules.tree_broadcast(rank, size, 0), memories, adopt=True)
    shared = board.Board(memories[0], rank, size)
    shared.open()
    await by_messages.barrier(run)
    # A rank that got a copy sees no mark of another rank, and no other rank sees its.
    return SharedPath(shared, rank) if shared.is_shared else by_messages


def _is_willing(run: CollectiveRun) -> bool:
    """Return whether this rank may share memory at all, and can be given it."""
    worker = run.matching.worker
    if worker.options.limits.shared_memory_bytes <= 0 or not board.is_supported:
        return False
    # Memory without a name is passed through Unix sockets only.
    return any(Address.parse(address).scheme == "uds" for address in worker.addresses)


def _board_memory(size: int) -> torch.Tensor | None:
    """Make the board, anonymous memory; return None if the system gives none."""
    try:
        return shared_bytes(board.board_bytes(size), "asyncrpc-board")
    except (OSError, RuntimeError):
        return None


def _host_number() -> int:
    """Return a number that only processes of this host have."""
    digest = hashlib.blake2b(HOST_ID.encode(), digest_size=_WORD_BYTES).digest()
    return int.from_bytes(digest, "big") >> 1
