"""No launcher outlives its test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.clusters.mpi.launchers import end_all


@pytest.fixture(autouse=True)
def launchers_end(nothing_left_behind: None) -> Iterator[None]:
    """End those that a failed test has left, before its processes are counted."""
    del nothing_left_behind
    yield
    end_all()
