"""What parts of a worker hold, for tests that count it; nothing else reads it."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import Any

from asyncrpc.clusters.actors.exclusive import TurnTaker
from asyncrpc.core.barriers.machine.series import Series
from asyncrpc.core.barriers.machine.table import SeriesTable
from asyncrpc.core.calls.credit import InboundCredit
from asyncrpc.core.links.directory import Directory
from asyncrpc.core.optim.service import OptimizerService
from asyncrpc.core.services.router import Route, Router
from asyncrpc.core.shm.machine.pool import SlabPool
from asyncrpc.core.transport.descriptors import DescriptorInbox
from asyncrpc.serving.batching.machine.fair_queue import FairQueue

# ruff: noqa: SLF001  (that is what this is for)


@dataclass(frozen=True, slots=True)
class CreditUse:
    """How a worker's budget for large requests is used."""

    held_bytes: int  # of requests that arrive, run, or are being answered
    promised_bytes: int  # that peers may send without asking further
    waiting: int  # requests of peers that are known to wait


def credit_use(credit: InboundCredit) -> CreditUse:
    budget = credit.budget
    promised_bytes = budget.tickets_bytes + budget.windows_bytes
    return CreditUse(budget.held_bytes, promised_bytes, budget.waiting)


def calls_waiting_for_turn(held: TurnTaker) -> int:
    return held._turns._waiting


def slabs_of(pool: SlabPool) -> tuple[int, ...]:
    return tuple(pool._slabs)


def slab_bytes(pool: SlabPool, slab: int) -> int:
    return pool._slabs[slab].size_bytes


def held_bytes(pool: SlabPool) -> int:
    """Return how much of all slabs is in use."""
    return sum(
        slab.size_bytes - sum(slab.stops) + sum(slab.starts)
        for slab in pool._slabs.values()
    )


def series_of(table: SeriesTable) -> list[Series]:
    return list(table._all.values())


def optimizers_here(service: OptimizerService) -> int:
    """Return how many optimizers have a part on a worker."""
    return len(service._optimizers)


def turns_of(service: OptimizerService) -> int:
    """Return how many steps run on a worker, are kept, or wait."""
    return len(service._turns)


def early_dials(directory: Directory) -> int:
    """Return how many wait for a worker to have started."""
    return len(directory._early or ())


def unclaimed(inbox: DescriptorInbox) -> int:
    return len(inbox._unclaimed)


def shares_of(queue: FairQueue[Any], priority: int) -> Collection[Hashable]:
    """Return the clients of a level that are remembered, waiting or not."""
    return queue._levels[priority].shares.keys()


def routes_of(router: Router, service: str) -> list[Route]:
    return list(router._known.get(service, {}).values())
