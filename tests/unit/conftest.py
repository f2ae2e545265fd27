"""A module may choose the loops of its coroutine tests, as a class may."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]] | None:
    """Return the attribute `loops` of a test's module; None: as everywhere."""
    del config
    if getattr(getattr(item, "cls", None), "loops", None):
        return None
    return getattr(getattr(item, "module", None), "loops", None)
