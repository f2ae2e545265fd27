"""Turns to change parameters, awaited; carries out `optim.machine`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.core.optim.machine import Turns
from asyncrpc.errors import ClosedError


class TurnQueue:
    """The turns of one worker.  At most as many wait as there are calls in flight."""

    def __init__(
        self,
        needs: Callable[[AbstractSet[int]], tuple[str, ...]] = lambda _: (),
    ) -> None:
        """Begin without a turn.

        Args:
            needs: returns what a turn on some parameters waits for; see `waits.does`.
        """
        self.needs = needs
        self._turns = Turns()
        self._futures: dict[int, asyncio.Future[None]] = {}
        self._serial = 0

    def __len__(self) -> int:
        return len(self._turns)

    @waits(
        lambda at: WaitDescription(
            WaitKind.TURN,
            "its turn to change parameters",
            at["self"],
            needs=at["self"].needs(at["keys"]),
        )
    )
    async def take(self, keys: AbstractSet[int]) -> int:
        """Wait for a turn on these parameters; return its number, for `end`."""
        self._serial += 1
        turn = self._serial
        if self._turns.ask(turn, keys):
            return turn
        future = asyncio.get_running_loop().create_future()
        self._futures[turn] = future
        try:
            await future
        except (asyncio.CancelledError, ClosedError):
            self.end(turn)
            raise
        return turn

    def close(self) -> None:
        """Give no more turns, as the worker ends."""
        for future in self._futures.values():
            if not future.done():
                future.set_exception(ClosedError("the worker was shut down"))

    def end(self, turn: int) -> None:
        """End a turn, or give up waiting for it."""
        self._futures.pop(turn, None)
        for following in self._turns.end(turn):
            future = self._futures.pop(following)
            if not future.done():  # else its wait was cancelled, and ends by itself
                future.set_result(None)


def step_label(optimizer: tuple[int, int]) -> str:
    """Return the label of the step that an optimizer takes; see `waits.does`."""
    maker, serial = optimizer
    return f"step {maker:016x}/{serial}"
