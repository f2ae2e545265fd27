"""What the workers of these tests call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Final

import asyncrpc
from asyncrpc import observability

waiting: Final[dict[str, asyncio.Event]] = {}
_serving: Final[list[Any]] = []  # of a process that has one worker


async def double(value: int) -> int:
    return 2 * value


async def fail() -> None:
    raise KeyError("it is what this function does")


async def count_to(end: int) -> AsyncIterator[int]:
    for number in range(end):
        yield number


async def wait_for(name: str) -> None:
    """Run until the test, which is in the same process, lets it end."""
    await waiting[name].wait()


async def serve_here() -> int:
    """Show the metrics of this process's worker at a port of its own."""
    serving = observability.serve_metrics(asyncrpc.current_worker(), port=0)
    _serving.append(serving)
    port: int = await serving.__aenter__()
    return port


async def serve_no_more() -> None:
    """Close the port."""
    await _serving.pop().__aexit__(None, None, None)
