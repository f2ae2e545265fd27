"""Functions that may block, such as those of the system and of Ray, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    """Run a function that may block in a thread; also a cancelled wait sees its end."""
    call = partial(function, *args)
    done = asyncio.get_running_loop().run_in_executor(None, call)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise
