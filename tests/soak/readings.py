"""What a worker's process has in use: memory, descriptors, tasks, threads, tables."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import asyncrpc
from asyncrpc.core.rref.service import RRefService
from tests.inner_state import credit_use, held_bytes

MIB: Final = 1 << 20

# What memory may grow by without a leak: the C library and Python keep some of what is
# freed, 1 MiB when measured.  200,000 calls that each leak 42 bytes are above it.
GROWTH_BYTES_MAX: Final = 8 * MIB


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process has in use."""

    rss_bytes: int  # resident memory that is its own; shared memory is not counted
    counts: dict[str, int]  # how many of what

    def leaks_since(self, before: Reading) -> list[str]:
        """Name what there is more of than before."""
        leaks = [
            f"{name}: {before.counts[name]} -> {count}"
            for name, count in self.counts.items()
            if count > before.counts[name]
        ]
        if self.rss_bytes - before.rss_bytes > GROWTH_BYTES_MAX:
            grown = (self.rss_bytes - before.rss_bytes) / MIB
            leaks.append(f"memory: {grown:.0f} MiB more")
        return leaks


@asyncrpc.on_loop
def take_reading() -> Reading:
    """Look at this process; collects garbage, and gives back what is free, before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    counts = {
        "descriptors": len(os.listdir("/proc/self/fd")),  # noqa: PTH208  (cheaper)
        "threads": threading.active_count(),
        "tasks": len(asyncio.all_tasks()),
    }
    return Reading(_own_bytes(), counts | tables())


def _own_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) << 10
    raise LookupError("RssAnon")


def tables() -> dict[str, int]:
    """Count what the current worker keeps; a call that asks is one of the served."""
    worker = asyncrpc.current_worker()
    links = worker.parts.directory.links
    credit = credit_use(worker.parts.inbound_credit)
    counts = {
        "pending calls": sum(len(link.pending) for link in links),
        "served calls": sum(len(link.served) for link in links),
        "active calls": worker.parts.active,
        "requests waiting for credit": sum(len(link.credit.waiting) for link in links),
        "inbound bytes held": credit.held_bytes,
        "tickets": sum(len(link.credit.account.tickets) for link in links),
        "requests arriving": sum(len(link.credit.account.arriving) for link in links),
        "leases of shared memory": len(worker.parts.memory.leases),
        "bytes held in own slabs": held_bytes(worker.parts.memory.pool),
        "shared regions": len(worker.parts.memory.regions),
        "received memory kept": worker.parts.receive_pool.idle_bytes,
    }
    references = worker.parts.references
    assert isinstance(references, RRefService)
    return counts | {f"references {k}": n for k, n in references.counts().items()}
