"""What a call costs the callee does not grow with how many call it, in lines of code.

Lines of asyncrpc are counted that run while calls are made, in virtual time: the count
is the same on every machine.  `tests.bench.bench_at_rest` has processor time.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import asyncrpc
from asyncrpc import Worker
from asyncrpc.testing import Cluster
from asyncrpc.testing.network import Network
from tests.simulated import play

ASYNCRPC = str(Path(asyncrpc.__file__).parent)
OUTSTANDING = 64
CALLS_EACH = 2 * OUTSTANDING
# Of some 530 lines, at both ends; a look at each of five more callers would add five.
GROWTH_LINES_MAX = 2.0


class Lines:
    """Counts lines of asyncrpc that run.

    Attributes:
        count: so far.
    """

    def __init__(self) -> None:
        self.count = 0

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        """Take a call; see `sys.settrace`."""
        _ = event, argument
        is_ours = frame.f_code.co_filename.startswith(ASYNCRPC)
        return self._on_line if is_ours else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        _ = frame, argument
        self.count += event == "line"
        return self._on_line


@contextmanager
def counted() -> Iterator[Lines]:
    before = sys.gettrace()  # of who measures what the tests reach
    lines = Lines()
    sys.settrace(lines.trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


async def nothing() -> None:
    """Do nothing, on the loop."""


async def call_many(caller: Worker) -> None:
    """Make `CALLS_EACH` calls, a number of them outstanding at a time."""
    peer = caller.peer("callee")

    async def call_on() -> None:
        for _ in range(CALLS_EACH // OUTSTANDING):
            await peer.call(nothing)

    await asyncio.gather(*(call_on() for _ in range(OUTSTANDING)))


def lines_per_call(callers: int) -> float:
    per_call: list[float] = []

    async def scenario(network: Network) -> None:
        names = [f"c{number}" for number in range(callers)]
        async with Cluster(names=["callee", *names], network=network) as workers:
            everyone = workers[1:]
            await asyncio.gather(*map(call_many, everyone))  # connects
            with counted() as lines:
                await asyncio.gather(*map(call_many, everyone))
            per_call.append(lines.count / (callers * CALLS_EACH))

    play(scenario, seed=1)
    return per_call[0]


def test_call_runs_no_more_lines_with_8_callers_than_with_3() -> None:
    few, many = lines_per_call(3), lines_per_call(8)
    assert many - few < GROWTH_LINES_MAX


def test_lines_of_code_are_counted() -> None:
    assert lines_per_call(1) > 100
