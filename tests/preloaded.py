"""One fork server for all tests of a process: what they start has imported everything.

A process that is spawned imports torch and asyncrpc: seconds.  One that is forked from
a server which has imported them is there in a tenth of a second.  Multiprocessing has
one server for the life of a process, with the modules that are named before its start:
so all are named here, whichever tests come first.
"""

from __future__ import annotations

import multiprocessing
from multiprocessing import forkserver, resource_tracker
from typing import Final

import pytest

from asyncrpc.core.multiprocessing.store import serve_store
from asyncrpc.multiprocessing import launch

MODULES: Final = (
    "asyncrpc",
    "asyncrpc.compat.nn",
    "asyncrpc.testing",
    "torch._dynamo",  # torch's optimizers import the compiler
    "tests.integration.parallel.collectives.scenarios",
    "tests.integration.parallel.ddp.ranks",
    "tests.integration.core.multiprocessing.targets",
    "tests.integration.core.remote",
    "tests.clusters.proxies.web_programs",
    "tests.integration.serving.replica_programs",
    "tests.integration.traces.remote",
    "tests.numerics.ddp.hooks_beside_torch",
    "tests.numerics.optimizers",
    "tests.numerics.remote",
    "tests.numerics.stages",
)


@pytest.fixture(scope="session", autouse=True)
def kept_for_life() -> None:
    """Start what multiprocessing keeps, before a test looks for what it left."""
    multiprocessing.set_forkserver_preload(list(MODULES))
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    serve_store()  # libuv keeps the pipe for signals that its first loop makes
    launch(abs, nprocs=1, method="forkserver")  # when it is back, all is imported
