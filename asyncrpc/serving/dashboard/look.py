"""One look at a group for all browsers that want it, and none if no browser does.

A request waits for a look that is newer than its last.  The first waiting request
starts a round; the others share it.  Rounds begin `every_s` apart.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from asyncrpc.core.loop.clock import NS_PER_S, wall_ns
from asyncrpc.core.loop.tasks import Tasks
from asyncrpc.errors import AsyncRpcError
from asyncrpc.tools.inspection.machine.slices import Slices, let_go
from asyncrpc.tools.inspection.polling import Round
from asyncrpc.tools.inspection.records import NoAnswer

LET_GO_MAX: Final = 50  # parts of a look, each with some dozens of values

T = TypeVar("T")
R = TypeVar("R")
D = TypeVar("D")


class NotFoundError(Exception):
    """A requested thing does not exist; the text is for people."""


class Seen(NamedTuple, Generic[D]):
    """What one look has shown.

    Attributes:
        number: of the look, from 1.
        taken_at_s: when it was complete, in seconds since 1970.
        took_s: seconds that it took.
        silent: why the others have not answered, by name.
        digest: result made from the answers; None if there is trouble.
        trouble: why the group could not be looked at; empty: no trouble.
    """

    number: int
    taken_at_s: float
    took_s: float
    workers: int
    silent: dict[str, NoAnswer]
    digest: D | None
    trouble: str = ""


def no_parts(_: Any) -> list[Any]:
    """Return no parts, for a digest that is small."""
    return []


class SharedLook(Generic[R, D]):
    """One kind of look, shared by all requests for it."""

    def __init__(
        self,
        tasks: Tasks,
        ask: Callable[[], Awaitable[Round[R]]],
        digest: Callable[[float, Round[R]], Slices[D]],
        *,
        every_s: float,
        parts_of: Callable[[D], list[Any]] = no_parts,
    ) -> None:
        self._tasks = tasks
        self._ask = ask
        self._digest = digest
        self._every_s = every_s
        self._parts_of = parts_of
        self._seen: Seen[D] | None = None
        self._round: asyncio.Task[None] | None = None
        self._began_s = -every_s

    async def newest(self) -> Seen[D]:
        """Return the last look, or a new one if the last is older than the period."""
        now_s = self._tasks.loop.time()
        if self._seen is not None and now_s - self._began_s < self._every_s:
            return self._seen
        return await self.after(0 if self._seen is None else self._seen.number)

    async def after(self, number: int) -> Seen[D]:
        """Return a look with a higher number than another one."""
        while self._seen is None or self._seen.number <= number:
            if self._round is None or self._round.done():
                self._round = self._tasks.start_task(self._look())
            await asyncio.wait((self._round,))
            if self._round.done() and not self._round.cancelled():
                self._round.result()  # raises an error of the round here
        return self._seen

    async def _look(self) -> None:
        loop = self._tasks.loop
        await asyncio.sleep(max(0.0, self._began_s + self._every_s - loop.time()))
        self._began_s = loop.time()
        number = 1 if self._seen is None else self._seen.number + 1
        try:
            round_ = await self._ask()
        except (AsyncRpcError, NotFoundError, TimeoutError) as error:
            at_s, took_s = wall_ns() / NS_PER_S, loop.time() - self._began_s
            text = str(error) or "no worker has answered in time"
            self._seen = Seen(number, at_s, took_s, 0, {}, None, text)
            return
        at_s, took_s = wall_ns() / NS_PER_S, loop.time() - self._began_s
        digest = await in_slices(self._digest(at_s, round_))
        parts = self._parts()
        self._seen = Seen(number, at_s, took_s, round_.workers, round_.silent, digest)
        await in_slices(let_go(parts, LET_GO_MAX))

    def _parts(self) -> list[Any]:
        """Return the parts of the last look, so that they are not freed with it."""
        if self._seen is None or self._seen.digest is None:
            return []
        return self._parts_of(self._seen.digest)


async def in_slices(work: Slices[T]) -> T:
    """Do work slice by slice; other tasks run between two slices."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            result: T = end.value
            return result
        await asyncio.sleep(0)
