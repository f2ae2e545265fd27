"""Workers that may outlive their program: recorded first, and then told to stay.

In this order, whatever is left of a program that is killed meanwhile is in the record.
"""

from __future__ import annotations

import asyncio
from typing import Final

from asyncrpc.api import Worker
from asyncrpc.clusters import kept
from asyncrpc.clusters.service import StayWorker
from asyncrpc.clusters.threads import in_thread
from asyncrpc.clusters.worker import WorkerStarted
from asyncrpc.extend import ask, host_of

# A new worker meets so many of those before it; they tell the others.
_INTRODUCED_MAX: Final = 3


class Keeper:
    """Keeps the workers of a cluster."""

    def __init__(self, worker: Worker, name: str, secret: bytes) -> None:
        """Begin with an empty record; see `kept.claim`."""
        self._worker, self._name = worker, name
        self._secret = secret.hex()
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._writing = asyncio.Lock()

    async def keep(self, name: str, report: WorkerStarted) -> None:
        """Record a worker that has started, and tell it to stay."""
        others = [other for other in self._addresses if other != name]
        self._addresses[name] = report.addresses
        async with self._writing:
            record = kept.KeptCluster(self._name, dict(self._addresses), self._secret)
            await in_thread(kept.write_record, record)
        link_to, met = host_of(self._worker).link_to, others[:_INTRODUCED_MAX]
        await ask(await link_to(name), StayWorker(met))
        for other in met:  # which may not have heard of the new one
            await ask(await link_to(other), StayWorker([name]))
