"""Tests of clusters: what was started ends, however the tests end.

A daemon or a launcher is ended by the fixture or the context that started it.  So that
these are left in order, a SIGTERM counts as a Ctrl-C, and a test that hangs raises.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Final

import pytest

# Each wait has a limit of its own, tests/clusters/hanging.py; a test has several.
TEST_HANGS_S: Final = 7200


@pytest.hookimpl(tryfirst=True)  # the folders below may know better
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    here = Path(__file__).parent
    for item in items:
        if item.path.is_relative_to(here):
            item.add_marker(pytest.mark.timeout(TEST_HANGS_S, method="signal"))
