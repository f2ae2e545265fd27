"""Finds out from another thread whether an event loop runs."""

from __future__ import annotations

import asyncio
import threading
from typing import Final

from asyncrpc.core.links.heartbeat import now_ns
from asyncrpc.core.loop.clock import NS_PER_S

LOOP_ANSWERS_S: Final = 0.25  # a loop that takes longer counts as blocked


def blocked_for_s(loop: asyncio.AbstractEventLoop, ticked_ns: int | None) -> float:
    """Return how long a loop has not run; 0 if it runs.

    Args:
        ticked_ns: when the loop last ran, in nanoseconds; None: unknown.
    """
    runs = threading.Event()
    try:
        loop.call_soon_threadsafe(runs.set)
    except RuntimeError:  # the loop is closed
        return 0.0
    if runs.wait(LOOP_ANSWERS_S):
        return 0.0
    if ticked_ns is None:
        return LOOP_ANSWERS_S
    return max(LOOP_ANSWERS_S, silent_for_s(ticked_ns))


def silent_for_s(ticked_ns: int) -> float:
    """Return the seconds since a loop last noted that it runs."""
    return (now_ns() - ticked_ns) / NS_PER_S
