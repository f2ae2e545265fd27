"""What the workers of the chaos suite run for each other, and the worker with logs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from typing import Any, cast

import torch

import asyncrpc
from asyncrpc import AsyncRpcError, RRef, Worker
from asyncrpc.core.ids import WorkerId
from tests.chaos.log import Log, now_s


class ChaosWorker(Worker):
    """A worker with logs."""

    def __init__(self, name: str, ran: Log, event_log: Log, **arguments: Any) -> None:
        super().__init__(name, **arguments)
        self.ran = ran
        self.event_log = event_log
        self.kept: list[RRef[Counter]] = []
        event_log.write("I", f"{self.incarnation:016x}")
        chronicle = Chronicle(event_log)
        self.parts.extensions.append(lambda parts: parts.services.add(chronicle))


class Chronicle:
    """Enters which workers this one has given up, and which came back: a `Service`."""

    name = "chronicle"
    routes = ()  # nobody asks or tells it anything

    def __init__(self, event_log: Log) -> None:
        self._event_log = event_log

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        self._enter("L", peer, " ".join(reason.split()))

    def on_peer_back(self, peer: WorkerId) -> None:
        self._enter("K", peer, "")

    def _enter(self, word: str, peer: WorkerId, why: str) -> None:
        life = f"{peer.incarnation:016x}"
        self._event_log.write(word, peer.name, life, f"{now_s():.4f}", why)

    async def close(self) -> None:
        """It has nothing."""


def worker_here() -> ChaosWorker:
    return cast("ChaosWorker", asyncrpc.current_worker())


def begin(call_id: str) -> None:
    worker_here().ran.write("B", call_id)


async def run(call_id: str) -> str:
    begin(call_id)
    return call_id


def run_plain(call_id: str) -> str:
    begin(call_id)
    return call_id


async def sleep(call_id: str, seconds: float) -> str:
    begin(call_id)
    await asyncio.sleep(seconds)
    return call_id


def block(call_id: str, seconds: float) -> str:
    begin(call_id)
    time.sleep(seconds)
    return call_id


def double(call_id: str, value: torch.Tensor) -> torch.Tensor:
    begin(call_id)
    return value * 2


async def relay(call_id: str, to: str) -> str:
    """Call on, in the time that is left."""
    begin(call_id)
    with contextlib.suppress(AsyncRpcError):
        await asyncrpc.current_worker().peer(to).call(run, f"{call_id}/1")
    return call_id


async def count_to(call_id: str, end: int) -> AsyncIterator[torch.Tensor]:
    begin(call_id)
    for number in range(end):
        yield torch.full((4096,), float(number))


class Counter:
    def __init__(self, call_id: str) -> None:
        begin(call_id)
        self.count = 0

    def add(self, call_id: str) -> str:
        begin(call_id)
        self.count += 1
        return call_id


async def keep(call_id: str, rref: RRef[Counter]) -> str:
    begin(call_id)
    kept = worker_here().kept
    kept.append(rref)
    del kept[:-8]
    return call_id
