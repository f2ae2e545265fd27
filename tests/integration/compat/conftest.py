"""What the tests of the facade share."""

import multiprocessing
from multiprocessing import forkserver, resource_tracker

import pytest

from asyncrpc.multiprocessing import launch
from asyncrpc.multiprocessing.store import serve_store


@pytest.fixture(scope="session", autouse=True)
def kept_for_life() -> None:
    """Start what multiprocessing keeps, before a test looks for what it left behind.

    The fork server has loaded what takes time: torch's optimizers import the compiler.
    """
    multiprocessing.set_forkserver_preload(
        ["asyncrpc.multiprocessing", "asyncrpc.compat.nn", "torch._dynamo"]
    )
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    serve_store()
    launch(abs, nprocs=1, method="forkserver")  # it has
