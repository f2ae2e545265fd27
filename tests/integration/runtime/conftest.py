"""Groups of workers: in memory, and where the transport matters on real sockets."""

from __future__ import annotations

import multiprocessing
from collections.abc import AsyncIterator
from multiprocessing import forkserver, resource_tracker

import pytest

from asyncrpc import Options, Worker
from asyncrpc.multiprocessing.store import serve_store
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import Wires

Trio = tuple[Worker, Worker, Worker]


@pytest.fixture(scope="session", autouse=True)
def kept_for_life() -> None:
    """Start what multiprocessing keeps, before a test looks for what it left."""
    multiprocessing.set_forkserver_preload(
        ["asyncrpc", "asyncrpc.testing", "tests.integration.runtime.remote"]
    )
    resource_tracker.ensure_running()
    forkserver.ensure_running()
    serve_store()  # libuv keeps the pipe for signals that its first loop makes


@pytest.fixture(params=["mem", "uds", "tcp"])
def wires(request: pytest.FixtureRequest) -> Wires:
    chosen: Wires = request.param
    return chosen


@pytest.fixture
async def trio() -> AsyncIterator[Trio]:
    """Three workers in memory."""
    async with Cluster(3, options=Options(drain_timeout_s=2.0)) as (a, b, c):
        yield a, b, c


@pytest.fixture
async def wired(wires: Wires) -> AsyncIterator[Trio]:
    """Three workers on each transport in turn."""
    options = Options(drain_timeout_s=2.0)
    async with Cluster(3, network=wires, options=options) as (a, b, c):
        yield a, b, c
