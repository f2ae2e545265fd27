"""Polling: keeps an event loop awake while an answer is about to come.

What decides is in `machine.spin`.  To poll is to have one callback call itself again:
the loop then looks at its sockets and never sleeps.  Everything else on the loop has
its turn in between, and other threads can take the interpreter's lock each time.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from asyncrpc.clock import now_s
from asyncrpc.runtime.machine.spin import Spin

# How long it polls at most after a write.
LIMIT_S: Final = 300e-6


class Spinner:
    """Polls for one worker; made only if its options want it."""

    __slots__ = ("_loop", "_running", "_spin")

    def __init__(self, spin: Spin, loop: asyncio.AbstractEventLoop) -> None:
        self._spin = spin
        self._loop = loop
        self._running = False

    def wait(self) -> None:
        """Something is awaited from now on: poll for it, if that pays."""
        if self._spin.on_wait(now_s()) and not self._running:
            self._running = True
            self._loop.call_soon(self._look)

    def read(self) -> None:
        """Something has come."""
        self._spin.on_read(now_s())

    def _look(self) -> None:
        if self._spin.on_look(now_s()):
            # The thread or the peer that is to answer may wait for this very core:
            # without this, two pollers on one core answer each other after 8 ms.
            os.sched_yield()
            self._loop.call_soon(self._look)
        else:
            self._running = False


def spinner_for(spin: str | float, loop: asyncio.AbstractEventLoop) -> Spinner | None:
    """Return what polls as `Options.spin` says, or None."""
    if spin in {"off", 0} or os.cpu_count() == 1:
        return None  # on a single core nobody could answer while we poll
    if spin == "adaptive":
        return Spinner(Spin(LIMIT_S, adaptive=True), loop)
    return Spinner(Spin(float(spin), adaptive=False), loop)
