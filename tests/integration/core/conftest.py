"""Groups of workers: in memory, and where the transport matters on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from asyncrpc import Options, Worker
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import Wires
from tests.integration.core import remote

Trio = tuple[Worker, Worker, Worker]


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
def a(trio: Trio) -> Worker:
    return trio[0]


@pytest.fixture
def b(trio: Trio) -> Worker:
    return trio[1]


@pytest.fixture
def c(trio: Trio) -> Worker:
    return trio[2]


@pytest.fixture
async def wired(wires: Wires) -> AsyncIterator[Trio]:
    """Three workers on each transport in turn."""
    options = Options(drain_timeout_s=2.0)
    async with Cluster(3, network=wires, options=options) as (a, b, c):
        yield a, b, c


@pytest.fixture
def watch() -> Iterator[remote.Watch]:
    """What functions here note, and wait for, under the name `w`."""
    remote.watches["w"] = watcher = remote.Watch()
    yield watcher
    watcher.gate.set()
    del remote.watches["w"]
