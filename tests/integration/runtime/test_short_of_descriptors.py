"""A worker whose descriptors run out serves its members, and says what is short.

The worker of the test's own process has few; another process makes the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from asyncrpc import AsyncRpcError, NetworkOptions, Options, Worker
from asyncrpc.testing import ProcessCluster
from tests.certificates import Authority
from tests.integration.runtime import short_of_descriptors as short
from tests.integration.runtime.company import LIMIT_S, PATIENT
from tests.integration.runtime.groups import until

STRANGERS = 400
OPTIONS = Options(
    secret="0123456789abcdef0123456789abcdef",
    # What ends a stranger here is others, not time.
    network=NetworkOptions(handshake_timeout_s=600.0),
    liveness=PATIENT,
    drain_timeout_s=2.0,
)


@pytest.fixture(params=["tcp", "uds", "tls"])
async def worker(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Worker]:
    tls = Authority(tmp_path).tls() if request.param == "tls" else None
    async with ProcessCluster(
        ["b"],
        transport="uds" if request.param == "uds" else "tcp",
        options=replace(OPTIONS, tls=tls),
        method="forkserver",
    ) as a:
        yield a


def as_newcomer(worker: Worker) -> tuple[tuple[str, ...], Options]:
    network = replace(OPTIONS.network, listen=("tcp://127.0.0.1:0",))
    return worker.addresses, replace(OPTIONS, network=network, tls=worker.options.tls)


@contextlib.contextmanager
def one_line_a_second(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Of each kind, whatever is counted in it."""
    loop = asyncio.get_running_loop()
    begun_s, first = loop.time(), len(caplog.records)
    yield
    texts = [record.getMessage() for record in caplog.records[first:]]
    kinds = Counter(re.sub(r"\d+|\([^)]*\)|'[^']*'", "", text) for text in texts)
    assert all(count <= 1 + loop.time() - begun_s for count in kinds.values()), kinds


@pytest.mark.parametrize("left", [12, 150], ids=["exhausted", "enough"])
async def test_members_and_newcomers_get_in_while_strangers_keep_coming(
    worker: Worker, left: int, caplog: pytest.LogCaptureFixture
) -> None:
    b, newcomer = worker.peer("b"), as_newcomer(worker)
    assert await b.call(short.ask_as_member, 0) == 1
    with short.descriptors_left(left), one_line_a_second(caplog):
        for number in range(3):
            flood = b.call(short.come, worker.addresses[0], STRANGERS)
            async with asyncio.timeout(LIMIT_S):
                assert await b.call(short.ask_as_member, number) == number + 1
                assert await b.call(short.ask_as_newcomer, *newcomer, number)
                await flood
                assert await b.call(short.ask_as_newcomer, *newcomer, number + 10)
        assert len(worker.parts.directory.admission) <= left
    text = caplog.text
    assert "raise its limit, `ulimit -n`" in text, text
    await b.call(short.go)
    await until(lambda: not worker.parts.directory.admission)


async def test_who_cannot_be_accepted_is_refused_at_once_and_served_later(
    worker: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    b, newcomer = worker.peer("b"), as_newcomer(worker)
    assert await b.call(short.ask_as_member, 0) == 1
    with short.descriptors_left(0), one_line_a_second(caplog):
        with pytest.raises(AsyncRpcError):
            await b.call(short.ask_as_newcomer, *newcomer, 1)
        assert await b.call(short.ask_as_member, 1) == 2
    assert "this process has no file descriptor left" in caplog.text
    assert await b.call(short.ask_as_newcomer, *newcomer, 2) == 3
