"""Turns: a worker dials some peers at a time, and the others wait for theirs.

A worker that calls hundreds of peers for the first time, all at once, would begin all
of these handshakes and end none within its time; so would 128 workers of one host.
`machine.dial_window` says how many there may be.  The time of a dial counts from its
turn.

Of the waiting peers, the next one by name after the worker's own has the next turn: if
all workers call all, in whichever order, each is dialed by a few at a time.

A host that is gone answers nothing, which costs nothing either: a dial that has not
connected within `CONNECT_TURN_S` lets the next one begin, and goes on beside it.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from asyncrpc.core.links.machine.dial_window import DialWindow

CONNECT_TURN_S: Final = 0.5


class DialTurn:
    """The turn of one dial.

    Attributes:
        is_held: whether it has begun, and has not ended.
        is_over: whether it has ended, or is not waited for any more.
    """

    def __init__(self, turns: DialTurns, wakes: asyncio.Event) -> None:
        self._turns = turns
        self._wakes = wakes
        self.is_held = False
        self.is_over = False
        self._began_s = 0.0

    async def begun(self) -> None:
        """Wait until the turn has come, or something else wakes it."""
        await asyncio.sleep(0)  # until all that begin at this moment are here
        self._turns.give()
        if not self.is_held:
            await self._wakes.wait()

    def begin(self) -> None:
        """Begin the dial: its turn has come."""
        self.is_held = True
        self._began_s = asyncio.get_running_loop().time()
        self._wakes.set()

    def answered(self) -> None:
        """The peer has answered."""
        self._turns.on_answered(asyncio.get_running_loop().time() - self._began_s)

    def end(self) -> None:
        """Let the next dial begin, or stop waiting.  Idempotent."""
        self.is_over = True
        if self.is_held:
            self.is_held = False
            self._turns.on_end()

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """End the turn if the block, which connects, takes long."""
        loop = asyncio.get_running_loop()
        ending = loop.call_later(CONNECT_TURN_S, self.end)
        try:
            yield
        finally:
            ending.cancel()


class DialTurns:
    """The turns of one worker's dials."""

    def __init__(self, own_name: str, window: DialWindow) -> None:
        self._own_name = own_name
        self._window = window
        self._numbers = itertools.count()
        self._waiting: list[tuple[bool, str, int, DialTurn]] = []  # a heap

    @contextmanager
    def dial_turn(self, name: str, wakes: asyncio.Event) -> Iterator[DialTurn]:
        """Wait in line until the end of the block, or hold a turn.

        Not an asynchronous generator: the end of a loop closes those under the tasks
        that still use them.
        """
        turn = DialTurn(self, wakes)
        is_before = name < self._own_name
        heapq.heappush(self._waiting, (is_before, name, next(self._numbers), turn))
        try:
            yield turn
        finally:
            turn.end()

    def on_answered(self, took_s: float) -> None:
        """A peer has answered, so many seconds after its turn came."""
        self._window.on_answered(took_s)
        self.give()

    def on_end(self) -> None:
        """A turn has ended."""
        self._window.on_ended()
        self.give()

    def give(self) -> None:
        """Give turns to those who wait, as many as there are."""
        while self._waiting and self._window.may_begin:
            *_, turn = heapq.heappop(self._waiting)
            if not turn.is_over:
                self._window.on_begun()
                turn.begin()
