"""Processes for ranks start from one that has imported what they need."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker

import pytest


@pytest.fixture(scope="session", autouse=True)
def kept_for_life() -> None:
    """Start what multiprocessing keeps, before a test looks for what it left."""
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "asyncrpc.testing", "tests.numerics.ddp.hooks_beside_torch"]
    )
    resource_tracker.ensure_running()
    forkserver.ensure_running()
