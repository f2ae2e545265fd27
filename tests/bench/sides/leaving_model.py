"""The worker with the model: it notes when what was asked for is over."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from typing import Final

from asyncrpc.core.loop.clock import now_s
from asyncrpc.serving import ContinuousBatcher

STEP_S: Final = 0.01
STEPS_OF_ITEM: Final = 10  # so that 200 clients get 2,000 items a second
SLOTS: Final = 256

# When, by the name of the client: a generator's `finally` ran, a slot was free.
closed_s: dict[str, float] = {}
freed_s: dict[str, float] = {}
_stack: Final = AsyncExitStack()
_batchers: Final[list[ContinuousBatcher[str, list[str], int]]] = []


class SleepingModel:
    """A model whose steps take a while, and in which nobody's sequence ends."""

    def __init__(self) -> None:
        self._steps = itertools.count()

    def enter(self, names: list[str]) -> list[list[str]]:
        return [[name] for name in names]

    def step(self, states: list[list[str]]) -> list[tuple[list[int], bool]]:
        time.sleep(STEP_S)  # as of a device: the interpreter is free
        number = next(self._steps)
        return [
            ([number] if (number + at) % STEPS_OF_ITEM == 0 else [], False)
            for at in range(len(states))
        ]

    def leave(self, state: list[str]) -> None:
        freed_s[state[0]] = now_s()


async def begin() -> None:
    """Load the model."""
    batcher = ContinuousBatcher(SleepingModel(), SLOTS)
    _batchers.append(await _stack.enter_async_context(batcher))


async def tokens(name: str) -> AsyncIterator[int]:
    """Generate for a client until it leaves."""
    try:
        async with aclosing(_batchers[0].generate(name)) as items:
            async for item in items:
                yield item
    finally:
        closed_s[name] = now_s()


async def end() -> tuple[dict[str, float], dict[str, float]]:
    """Return what was noted, and forget it."""
    noted_s = dict(closed_s), dict(freed_s)
    closed_s.clear()
    freed_s.clear()
    return noted_s


async def unload() -> None:
    await _stack.aclose()
