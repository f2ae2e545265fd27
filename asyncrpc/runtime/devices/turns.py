"""Turns at devices that only one thread may use at a time.

torch_xla keeps the graph of what is still to be computed per device, for all threads:
two that touch it at once crash the process.  The devices are the process's, and so are
its turns: the one lock here is for every worker in it, and for the program's own
threads.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from asyncrpc.errors import UsageError

TURN: Final = threading.Lock()


@contextmanager
def turn() -> Iterator[None]:
    """Use a device that takes turns from a thread of the program's own.

    Functions that run for calls have their turn already, as has what
    `asyncrpc.devices.run` runs.  Nothing else moves meanwhile, copies for calls among
    it: be brief, and wait for no call.

    Raises:
        UsageError: called on an event loop, which it could stop: use
            `asyncrpc.devices.run`.

    Example:
        >>> with asyncrpc.devices.turn():
        ...     loss = model(batch).sum()
    """
    with suppress(RuntimeError):
        asyncio.get_running_loop()
        raise UsageError(
            "a turn at a device would stop the event loop while others have theirs; "
            "run what needs it by `await asyncrpc.devices.run(function)`"
        )
    with TURN:
        yield
