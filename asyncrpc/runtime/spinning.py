"""Polling: keeps an event loop awake while an answer is about to come.

What decides is in `runtime.spin`.  To poll is to have one callback call itself again:
the loop then looks at its sockets and never sleeps.  Everything else on the loop has
its turn in between.  While a function runs in a thread of this worker there is no
polling: the thread needs the interpreter's lock again and again, and the loop would
mostly have it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from asyncrpc.clock import now_s
from asyncrpc.runtime.spin import Spin
from asyncrpc.runtime.threads import ThreadPool

# How long it polls at most for an answer: a step of training waits for up to 2 ms, on a
# slow machine, where each core that is woken takes up to 0.3 ms.
LIMIT_S: Final = 4e-3


class Spinner:
    """Polls for one worker; made only if its options want it."""

    __slots__ = ("_host_pool", "_loop", "_pool", "_running", "_spin")

    def __init__(
        self,
        spin: Spin,
        loop: asyncio.AbstractEventLoop,
        pool: ThreadPool,
        host_pool: ThreadPool,
    ) -> None:
        self._spin = spin
        self._loop = loop
        self._pool = pool
        self._host_pool = host_pool
        self._running = False

    def wait(self, *, is_for_answer: bool) -> None:
        """Something is awaited from now on: poll for it, if that pays."""
        if self._pool.unfinished or self._host_pool.unfinished:
            return
        polls = self._spin.on_wait(now_s(), is_for_answer=is_for_answer)
        if polls and not self._running:
            self._running = True
            self._loop.call_soon(self._look)

    def read(self) -> None:
        """Something has come."""
        self._spin.on_read(now_s())

    def _look(self) -> None:
        is_busy = self._pool.unfinished or self._host_pool.unfinished
        if self._spin.on_look(now_s()) and not is_busy:
            # The thread or the peer that is to answer may wait for this very core:
            # without this, two pollers on one core answer each other after 8 ms.
            os.sched_yield()
            self._loop.call_soon(self._look)
        else:
            self._running = False


def spinner_for(
    spin: str | float,
    loop: asyncio.AbstractEventLoop,
    pool: ThreadPool,
    host_pool: ThreadPool,
) -> Spinner | None:
    """Return what polls as `NetworkOptions.spin` says, or None."""
    if spin in {"off", 0} or os.cpu_count() == 1:
        return None  # on a single core the peer could not answer while we poll
    if spin == "adaptive":
        return Spinner(Spin(LIMIT_S, adaptive=True), loop, pool, host_pool)
    return Spinner(Spin(float(spin), adaptive=False), loop, pool, host_pool)
