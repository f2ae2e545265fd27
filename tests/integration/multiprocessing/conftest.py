"""What multiprocessing and torch keep for the life of a process, made beforehand."""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker

import pytest

from asyncrpc.multiprocessing.store import serve_store


@pytest.fixture(scope="session", autouse=True)
def kept_for_life() -> None:
    """Start them before any test looks for what it left behind."""
    multiprocessing.set_forkserver_preload(
        [
            "asyncrpc.multiprocessing",
            "asyncrpc.runtime.loops",
            "tests.integration.multiprocessing.targets",
        ]
    )
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    serve_store()  # libuv keeps the pipe for signals that its first loop makes
