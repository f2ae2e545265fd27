"""Three workers on real sockets, all of them traced."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from asyncrpc import Options, Worker
from asyncrpc.testing import Cluster
from tests.integration.traces import remote
from tests.integration.traces.collected import Spans

Trio = tuple[Worker, Worker, Worker]


@pytest.fixture
def spans() -> Iterator[Spans]:
    exporter = Spans()
    remote.kept.append(exporter)
    yield exporter
    remote.kept.remove(exporter)
    exporter.provider.shutdown()


@pytest.fixture
async def plain() -> AsyncIterator[Trio]:
    """Workers of which none is traced yet."""
    options = Options(drain_timeout_s=2.0)
    async with Cluster(3, network="uds", options=options) as (a, b, c):
        yield a, b, c


@pytest.fixture
def trio(plain: Trio, spans: Spans) -> Trio:
    spans.trace(*plain)
    return plain


@pytest.fixture
def a(trio: Trio) -> Worker:
    return trio[0]
