"""Turns to change parameters: `Turns` decides whose it is, `TurnQueue` awaits it.

A holder asks for a turn on a set of parameters.  It has the turn when no earlier holder
shares a parameter with it, and keeps it until it ends.  So holders without a common
parameter go at once, the others go in the order in which they came, and none waits
forever.

Cycles of workers that wait for one another are not detected here.  A trainer that takes
and keeps turns on several workers takes them in the order of the workers' ids, so that
no cycle arises.

Source: strict two-phase locking with ordered acquisition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet

from asyncrpc.core.loop.waits import WaitDescription, WaitKind, waits
from asyncrpc.errors import ClosedError, LocalProtocolError


class Turns:
    """Which holders have a turn, and which wait for one."""

    __slots__ = ("_keys", "_waiting")

    def __init__(self) -> None:
        self._keys: dict[int, AbstractSet[int]] = {}  # by holder, in order of arrival
        self._waiting: set[int] = set()

    def __len__(self) -> int:
        return len(self._keys)

    def ask(self, holder: int, keys: AbstractSet[int]) -> bool:
        """Add a holder; return whether it has its turn at once."""
        if holder in self._keys:
            raise LocalProtocolError(f"holder {holder} has asked for a turn before")
        is_free = all(keys.isdisjoint(other_keys) for other_keys in self._keys.values())
        self._keys[holder] = keys
        if not is_free:
            self._waiting.add(holder)
        return is_free

    def end(self, holder: int) -> list[int]:
        """Let a holder go, whether it has its turn or waits."""
        if self._keys.pop(holder, None) is None:
            return []
        self._waiting.discard(holder)
        begun = [
            waiter
            for waiter in self._keys
            if waiter in self._waiting and self._may(waiter)
        ]
        self._waiting.difference_update(begun)
        return begun

    def _may(self, holder: int) -> bool:
        """Return whether no earlier holder shares a key with this one."""
        keys = self._keys[holder]
        for other, other_keys in self._keys.items():
            if other == holder:
                return True
            if not keys.isdisjoint(other_keys):
                return False
        return True


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
