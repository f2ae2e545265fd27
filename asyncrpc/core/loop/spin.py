"""When to poll for an answer instead of sleeping until it comes.

To wake a sleeping core takes 20 to 50 us, most of a small call's time; to poll takes a
core.  So the loop polls after it has written something, and only as long as that pays:

*   at most `limit_s` after a write for an answer, and a quarter of that where none is
    awaited: then the peer may do anything before it asks again;
*   adaptively, only while answers come within that time by experience, and no longer
    than twice what they lately took;
*   not at all for a while if the core was evidently wanted by others: if two looks that
    should be 2 us apart are `STOLEN_S` apart, another process that computes ran in
    between.

`Spin` decides, and time comes in from outside, in seconds.  `Spinner` polls: one
callback calls itself again, so the loop looks at its sockets and never sleeps, and
everything else on it has its turn in between.  While a function runs in a thread of
this worker there is no polling: the thread needs the interpreter's lock again and
again, and the loop would mostly have it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Final

from asyncrpc.core.loop.clock import now_s
from asyncrpc.core.loop.threads import ThreadPool

# Less than a process that computes keeps a core for, which is some 3 ms, and more than
# torch's threads and a host that runs other machines beside this one do.
STOLEN_S: Final = 2e-3
# The first time the core is missed; doubled each time, up to the most.  Another process
# keeps the core for some 3 ms: so seldom, one call in some 300 notices.
PAUSE_S: Final = 20e-3
PAUSE_MAX_S: Final = 0.5
# Of the limit, where no answer is awaited.
_UNAWAITED: Final = 0.25
# Share of the newest wait in the running mean.
_WEIGHT: Final = 0.125
# Waits are not counted beyond so many limits: one long pause must not be remembered for
# long.
_COUNTED: Final = 2

# How long it polls at most for an answer: a step of training waits for up to 2 ms, on a
# slow machine, where each core that is woken takes up to 0.3 ms.
LIMIT_S: Final = 4e-3


class Spin:
    """Decides for one event loop whether it polls."""

    __slots__ = (
        "_adaptive",
        "_counted_s",
        "_looked_s",
        "_pause_s",
        "_paused_until_s",
        "_since_s",
        "_until_s",
        "limit_s",
        "mean_wait_s",
    )

    def __init__(self, limit_s: float, *, adaptive: bool) -> None:
        self.limit_s = limit_s
        self.mean_wait_s = limit_s / 2  # try it first
        self._adaptive = adaptive
        self._since_s: float | None = None  # when the wait began
        self._counted_s = 0.0  # of it at most
        self._until_s = 0.0
        self._looked_s = 0.0
        self._pause_s = PAUSE_S
        self._paused_until_s = 0.0

    def on_wait(self, now_s: float, *, is_for_answer: bool = True) -> bool:
        """Something is awaited from now on; say whether to poll for it."""
        self._since_s = now_s
        window_s = self.limit_s
        if not is_for_answer and self._adaptive:
            window_s *= _UNAWAITED
        self._counted_s = _COUNTED * window_s
        if self._adaptive:
            if self.mean_wait_s > window_s or now_s < self._paused_until_s:
                return False
            window_s = min(window_s, 2 * self.mean_wait_s + 10e-6)
        self._until_s = now_s + window_s
        self._looked_s = now_s
        return True

    def on_read(self, now_s: float) -> None:
        """Something has come: no polling until something is awaited again.

        What has come may be a call for another thread, which needs the core.
        """
        if self._since_s is None:
            return
        if now_s < self._until_s:
            self._pause_s = PAUSE_S  # it paid
        self._until_s = 0.0
        wait_s = min(now_s - self._since_s, self._counted_s)
        self._since_s = None
        self.mean_wait_s += _WEIGHT * (wait_s - self.mean_wait_s)

    def on_look(self, now_s: float) -> bool:
        """The loop has looked; say whether it goes on polling."""
        if not self._until_s:
            return False  # something has come; what was done with it took its time
        since_s, self._looked_s = now_s - self._looked_s, now_s
        if self._adaptive and since_s > STOLEN_S:
            self._paused_until_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, PAUSE_MAX_S)
            return False
        return now_s < self._until_s


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
