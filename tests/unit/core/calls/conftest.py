"""The parts of a link, over a connection that is none, on a loop that runs nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.unit.core.calls.fakes import Parts


@pytest.fixture
def link() -> Iterator[Parts]:
    """Give the parts of a link; this thread counts as the one of its loop."""
    parts = Parts()
    before = asyncio._get_running_loop()  # noqa: SLF001  (there is no other way)
    asyncio._set_running_loop(parts.host.loop)  # noqa: SLF001
    yield parts
    asyncio._set_running_loop(before)  # noqa: SLF001
    for coroutine in parts.host.tasks:
        coroutine.close()
