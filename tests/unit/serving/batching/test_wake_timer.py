"""One timer that is set again and again."""

from __future__ import annotations

import asyncio
import contextvars

from asyncrpc.serving.batching.wake_timer import WakeTimer


async def test_due_time_may_be_set_again() -> None:
    """On uvloop, what waits for no time is no timer."""
    woken: asyncio.Queue[float] = asyncio.Queue()
    timer = WakeTimer(woken.put_nowait)
    context = contextvars.copy_context()
    now_s = asyncio.get_running_loop().time()
    for at_s in (now_s, now_s, now_s - 1.0):
        timer.set(at_s, context)
    assert await woken.get() == now_s - 1.0
    assert woken.empty()


async def test_last_time_set_counts() -> None:
    woken: asyncio.Queue[float] = asyncio.Queue()
    timer = WakeTimer(woken.put_nowait)
    context = contextvars.copy_context()
    now_s = asyncio.get_running_loop().time()
    timer.set(now_s + 3600.0, context)
    timer.set(None, context)
    timer.set(now_s + 0.002, context)
    assert await woken.get() == now_s + 0.002
    assert woken.empty()
