"""Every test of these suites: nothing of asyncrpc waits for what never comes."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator
from typing import Final

import pytest
import pytest_asyncio

from asyncrpc.testing import all_end
from tests.preloaded import kept_for_life

__all__ = ["kept_for_life"]  # pytest looks for fixtures here

WITHIN_S: Final = 30.0  # which only a hang takes


@pytest.fixture(autouse=True)
def every_wait_ends(quiet_loop: None, request: pytest.FixtureRequest) -> None:
    """After a coroutine test no call, stream, value or task of asyncrpc is pending."""
    del quiet_loop  # it has to come first, and so look last
    if inspect.iscoroutinefunction(getattr(request, "function", None)):
        request.getfixturevalue("watched_waits")


@pytest_asyncio.fixture
async def watched_waits(watched_loop: None) -> AsyncIterator[None]:
    del watched_loop
    async with all_end(within_s=WITHIN_S):
        yield
