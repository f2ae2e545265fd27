"""A worker whose descriptors run out serves its members, and says what is short.

The worker of the test's own process has few; another process makes the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import re
import socket
import tempfile
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, cast

import pytest
import torch

import asyncrpc
from asyncrpc import AsyncRpcError, Options, Worker, observability, serving
from asyncrpc.core.transport.accepting import SocketAcceptor
from asyncrpc.errors import EncodeError
from tests.certificates import Authority
from tests.integration.core import remote
from tests.integration.core import short_of_descriptors as short
from tests.integration.core.company import LIMIT_S, PATIENT
from tests.integration.core.groups import alone, processes, until
from tests.integration.core.loops_of_processes import kind_of_loop, processes_on
from tests.ports import free_port

STRANGERS = 400
OPTIONS = Options(
    secret="0123456789abcdef0123456789abcdef",
    # What ends a stranger here is others, not time.
    network=asyncrpc.NetworkOptions(handshake_timeout_s=600.0),
    liveness=PATIENT,
    drain_timeout_s=2.0,
)


@pytest.fixture(params=["tcp", "uds", "tls"])
async def worker(
    request: pytest.FixtureRequest, tmp_path: Path
) -> AsyncIterator[Worker]:
    tls = Authority(tmp_path).tls() if request.param == "tls" else None
    async with processes(
        "b",
        transport="uds" if request.param == "uds" else "tcp",
        options=replace(OPTIONS, tls=tls),
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


# --- what needs a descriptor, and finds none -----------------------------------------

CURES = {
    errno.EMFILE: "this process has no file descriptor left",
    errno.ENFILE: "this host has no file descriptor left",
}


async def dial(worker: Worker) -> object:
    """Call a worker that there is no connection to."""
    return await worker.peer("c").call(remote.add, 1)


async def start(_: Worker, listen: tuple[str, ...] | None = None) -> object:
    """Start another worker, by default with a directory for its sockets."""
    options = replace(OPTIONS, network=replace(OPTIONS.network, listen=listen))
    async with alone("z", options) as another:
        return another.addresses


async def start_at_a_port(worker: Worker) -> object:
    return await start(worker, ("tcp://127.0.0.1:0",))


async def start_by_store(_: Worker, store: str = "tcp://127.0.0.1:{port}") -> object:
    network = replace(OPTIONS.network, listen=("tcp://127.0.0.1:0",))
    options = replace(OPTIONS, network=network, rendezvous_timeout_s=STORE_S)
    async with Worker(
        "z", rank=0, world_size=1, rendezvous=store.format(port=PORT), options=options
    ) as z:
        return z.addresses


def remove(path: Path) -> None:
    path.unlink(missing_ok=True)


async def start_by_file(worker: Worker) -> object:
    path = f"{tempfile.gettempdir()}/{os.urandom(8).hex()}"
    try:
        return await start_by_store(worker, f"file://{path}")
    finally:
        remove(Path(path))


async def serve_metrics(worker: Worker) -> object:
    async with observability.serve_metrics(worker, port=0) as port:
        return port


async def serve_health(worker: Worker) -> object:
    async with serving.serve_health(worker, port=0) as port:
        return port


async def share(_: Worker) -> object:
    return asyncrpc.share(torch.ones(1 << 16))


NEEDS = {
    needs.__name__: needs
    for needs in (
        dial,
        start,
        start_at_a_port,
        start_by_store,
        start_by_file,
        serve_metrics,
        serve_health,
        share,
    )
}
# One of the first few descriptors of these goes to a listening socket.
STORES = [start_by_store, start_by_file]
STORE_S = 3.0
PORT = free_port()


@asynccontextmanager
async def three(transport: Literal["uds", "tcp"]) -> AsyncIterator[Worker]:
    with processes_on(kind_of_loop()):
        async with processes("b", "c", transport=transport, options=OPTIONS) as a:
            assert await a.peer("b").call(remote.add, 1) == 2
            yield a


def says_the_cure(error: Exception, number: int) -> None:
    assert CURES[number] in str(error)
    assert "raise its limit" in str(error)


@pytest.mark.parametrize("transport", ["uds", "tcp"])
@pytest.mark.parametrize("needs", NEEDS)
async def test_exhausted_descriptors_are_reported_then_recovered(
    needs: str, transport: Literal["uds", "tcp"]
) -> None:
    async with three(transport) as worker:
        with short.descriptors_left(0):
            async with asyncio.timeout(LIMIT_S):
                with pytest.raises((AsyncRpcError, OSError)) as caught:
                    await NEEDS[needs](worker)
                says_the_cure(caught.value, errno.EMFILE)
                # The others notice nothing.
                assert await worker.peer("b").call(remote.add, 1) == 2
        assert await asyncio.wait_for(NEEDS[needs](worker), LIMIT_S) is not None


@pytest.mark.parametrize("left", [1, 3, 5])
@pytest.mark.parametrize("needs", STORES)
async def test_store_without_a_descriptor_is_named(
    needs: Callable[[Worker], Awaitable[object]], left: int
) -> None:
    nobody = cast("Worker", None)
    with short.descriptors_left(left), pytest.raises(AsyncRpcError) as caught:
        await needs(nobody)
    says_the_cure(caught.value, errno.EMFILE)
    assert "store" in str(caught.value) or "meeting place" in str(caught.value)
    assert await needs(nobody)


@pytest.mark.parametrize("left", range(12))
async def test_worker_with_few_descriptors_starts_or_reports_it(left: int) -> None:
    """Wherever they run out, it ends in one of these two ways."""
    with short.descriptors_left(left):
        try:
            async with asyncio.timeout(LIMIT_S):
                assert await start_at_a_port(cast("Worker", None))
        except AsyncRpcError as error:
            says_the_cure(error, errno.EMFILE)
    assert await start_at_a_port(cast("Worker", None))


async def test_large_tensors_go_by_socket_while_no_memory_can_be_shared() -> None:
    tensor = torch.arange(1 << 18)
    assert torch.equal(tensor + 0, tensor)  # torch imports what it needs for this
    async with three("uds") as worker:
        echo = worker.peer("b").call
        with short.descriptors_left(0):
            async with asyncio.timeout(LIMIT_S):
                assert torch.equal(await echo(remote.echo, tensor), tensor)
        assert torch.equal(await echo(remote.echo, tensor), tensor)


async def test_callee_without_descriptors_is_reported_then_recovers() -> None:
    """No call waits for the memory that the callee cannot take."""
    async with three("uds") as worker:
        b, large = worker.peer("b"), torch.arange(1 << 18)
        shared = asyncrpc.share(large.clone())
        await b.call(short.limit, 0)
        async with asyncio.timeout(LIMIT_S):
            for _ in range(2):
                with pytest.raises(EncodeError) as caught:
                    await b.call(remote.echo, shared)
                says_the_cure(caught.value, errno.EMFILE)
                assert torch.equal(await b.call(remote.echo, large), large)
        await b.call(short.lift)
        async with asyncio.timeout(LIMIT_S):
            assert torch.equal(await b.call(remote.echo, shared), large)
            while not worker.parts.memory.own_bytes:
                assert torch.equal(await b.call(remote.echo, large), large)


class Exhausted(socket.socket):
    """What socket(2) and accept(2) say when the table of all open files is full.

    Only root could fill it, for everybody on the host: so the error comes from here, at
    the calls that the kernel answers with it.
    """

    is_full: ClassVar[bool] = False

    def __init__(self, *args: Any, **more: Any) -> None:
        if self.is_full:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        super().__init__(*args, **more)

    def accept(self) -> Any:
        if self.is_full:
            raise OSError(errno.ENFILE, os.strerror(errno.ENFILE))
        return super().accept()


@pytest.mark.parametrize("needs", [dial, start_at_a_port])
async def test_host_out_of_descriptors_is_reported_then_recovered(
    needs: Callable[[Worker], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    async with three("tcp") as worker:
        with monkeypatch.context() as patch:
            patch.setattr(socket, "socket", Exhausted)
            patch.setattr(Exhausted, "is_full", True)
            with pytest.raises(AsyncRpcError) as caught:
                await needs(worker)
            says_the_cure(caught.value, errno.ENFILE)
        assert await asyncio.wait_for(needs(worker), LIMIT_S) is not None


async def test_connections_wait_while_the_host_has_no_descriptor(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even a refusal is possible, for that takes a descriptor, too."""
    listening = Exhausted(socket.AF_INET)
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    listening.settimeout(0)
    taken: list[socket.socket] = []
    acceptor = SocketAcceptor([listening], taken.append)
    monkeypatch.setattr(Exhausted, "is_full", True)
    with socket.create_connection(listening.getsockname()):
        await until(lambda: CURES[errno.ENFILE] in caplog.text)
        assert not taken
        monkeypatch.setattr(Exhausted, "is_full", False)
        await until(lambda: len(taken) == 1)
    acceptor.close()
    taken[0].close()


async def test_newcomer_without_a_descriptor_is_refused_then_served(
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
