"""A barrier without a centre: dissemination over the ranks.

In round k, rank r tells rank (r + 2^k) and waits to hear from rank (r - 2^k), modulo
the world size; after ceil(log2(world size)) rounds everyone has heard of everyone.

Source: Hensgen, Finkel, Manber, "Two algorithms for barrier synchronization", 1988.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any, Final

from asyncrpc.errors import (
    AsyncRpcError,
    MalformedError,
    Outcome,
    UsageError,
    WorkerLostError,
)
from asyncrpc.ids import WorkerId

if TYPE_CHECKING:
    from asyncrpc.runtime.link import Link
    from asyncrpc.runtime.worker import Worker

# A worker can be one barrier ahead of us, not more: what is kept stays small.
AHEAD_MAX: Final = 2
LAST_WORD_S: Final = 0.5  # for a word on its way from a worker that has left


class Barrier:
    """The barriers of one worker, one after the other; a `Service`."""

    name = "barrier"

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._generation = 0
        self._heard: set[tuple[int, int]] = set()  # generation and round
        self._changed = asyncio.Event()
        self._awaited = -1  # the rank we wait to hear from
        self._error: AsyncRpcError | None = None

    async def wait(self) -> None:
        """Pass one barrier.

        Raises:
            WorkerLostError: a worker is gone, here or where another one waits.
            UsageError: the group has no ranks.
        """
        worker = self._worker
        if worker.rank < 0 or worker.world_size < 1:
            raise UsageError("a barrier needs ranks: this group was made without")
        generation, self._generation = self._generation, self._generation + 1
        try:
            for step in range((worker.world_size - 1).bit_length()):
                await self._round(generation, step)
        except BaseException as error:
            self._tell_failure(f"worker {worker.name!r} gave up: {error!r}")
            raise
        finally:
            self._awaited = -1

    async def _round(self, generation: int, step: int) -> None:
        worker, distance = self._worker, 1 << step
        link = await self._link_to_rank(worker.rank + distance)
        link.notify(self.name, "here", [generation, step])
        word = (generation, step)
        if word not in self._heard:
            self._awaited = (worker.rank - distance) % worker.world_size
            await self._watch(word)
            await self._hear(word)
            self._awaited = -1
        self._heard.discard(word)

    async def _link_to_rank(self, rank: int) -> Link:
        worker = self._worker
        entry = worker.directory.find(rank % worker.world_size)
        return await worker.link_to(entry.member.name)

    async def _watch(self, word: tuple[int, int]) -> None:
        """Connect to the worker we wait for: or nobody would tell us of its death.

        It may have passed and left; then its word is here, or still on its way.
        """
        try:
            await self._link_to_rank(self._awaited)
        except AsyncRpcError:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_S):
                    await self._hear(word)
            if word not in self._heard:
                raise

    async def _hear(self, word: tuple[int, int]) -> None:
        while word not in self._heard:
            if self._error is not None:
                raise self._error
            self._changed.clear()
            await self._changed.wait()

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        """Take the word of another rank."""
        if method == "failed":
            self._fail(str(value))
            return
        generation, step = int(value[0]), int(value[1])
        if not self._generation - 1 <= generation <= self._generation + AHEAD_MAX:
            raise MalformedError(f"barrier {generation}; we are at {self._generation}")
        self._heard.add((generation, step))
        self._changed.set()

    async def on_request(self, link: Link, method: str, value: Any) -> Any:
        """Nothing here is asked for."""
        raise MalformedError(f"a barrier does not answer {method!r}")

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail if the worker we wait for is gone."""
        if self._awaited < 0:
            return
        if self._worker.directory.find(self._awaited).member.name == peer.name:
            self._fail(f"worker {peer.name!r} is gone: {reason}")

    async def close(self) -> None:
        """Nothing is held."""

    def _fail(self, problem: str) -> None:
        if self._error is None:
            self._error = WorkerLostError(
                problem, function="barrier", to="the group", outcome=Outcome.UNKNOWN
            )
            self._changed.set()

    def _tell_failure(self, problem: str) -> None:
        """Tell those who are connected, who tell those they are connected to."""
        for link in self._worker.directory.links:
            if link.peer.name != self._worker.name:
                link.notify(self.name, "failed", problem)
