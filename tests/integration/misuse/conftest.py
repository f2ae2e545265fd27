"""What multiprocessing keeps for the life of a process, made beforehand."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker

import pytest

from asyncrpc.multiprocessing import launch
from tests.integration.misuse.targets import rank_of


@pytest.fixture(scope="session", autouse=True)
def kept_for_life() -> None:
    """Start them before any test looks for what it left behind."""
    multiprocessing.set_forkserver_preload(
        ["asyncrpc.multiprocessing", "asyncrpc.runtime.loops"]
    )
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    launch(rank_of, method="forkserver")  # it has loaded them
