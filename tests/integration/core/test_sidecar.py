"""What became of a process is seen from its host, and told to others by its sidecar.

Each question is asked twice: as a peer on the same host looks for itself, and as one on
another host has to ask the sidecar.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

import asyncrpc
from asyncrpc import LivenessOptions, NetworkOptions, Options, UsageError, Worker
from asyncrpc.core.links.evidence import evidence_of
from asyncrpc.core.links.heartbeat import PulseAddress
from asyncrpc.core.links.machine.detector import Evidence
from asyncrpc.core.sidecar import pulse, query
from asyncrpc.core.sidecar.process import CONNECTIONS_MAX, PATIENCE_S
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.frames import Hello
from asyncrpc.testing import Cluster, ProcessCluster
from tests.integration.core import blocking
from tests.integration.core.groups import alone, processes, until

SECRET = "a secret of the group"
TCP = Options(
    secret=SECRET,
    network=NetworkOptions(listen=("tcp://127.0.0.1:0",)),
    liveness=LivenessOptions(sidecar="on"),
    drain_timeout_s=1.0,
)
ALONE = replace(TCP, liveness=replace(TCP.liveness, sidecar="off"))
GENEROUS_S = 60.0


def as_seen_from_elsewhere(hello: Hello) -> Hello:
    return replace(hello, host_id="another host")


async def ask(hello: Hello, *, secret: str = SECRET, timeout_s: float = 5) -> Evidence:
    return await evidence_of(
        hello, credentials_pid=None, secret=secret.encode(), timeout_s=timeout_s
    )


async def ask_both(hello: Hello, secret: str = SECRET) -> tuple[Evidence, Evidence]:
    return (
        await ask(hello, secret=secret),
        await ask(as_seen_from_elsewhere(hello), secret=secret),
    )


def started(options: Options = TCP) -> Worker:
    return alone("w", options)


def runs(pid: int) -> bool:
    return pid != 0 and not pulse.is_gone(pid)


# --- a worker of this process --------------------------------------------------------


async def test_running_loop_is_seen_as_ticking() -> None:
    async with started() as worker:
        assert set(await ask_both(worker.parts.hello())) == {Evidence.TICKING}


async def test_ended_worker_leaves_no_process() -> None:
    async with started() as worker:
        assert worker.parts.sidecar.process is not None
        pid, hello = worker.parts.sidecar.process.pid, worker.parts.hello()
        assert runs(pid)
    assert not runs(pid)
    assert set(await ask_both(hello)) == {Evidence.UNREACHABLE}


async def test_the_process_starts_when_a_peer_comes_that_needs_it() -> None:
    async with started(
        replace(TCP, liveness=replace(TCP.liveness, sidecar="auto"))
    ) as worker:
        process, hello = worker.parts.sidecar.process, worker.parts.hello()
        assert process is not None
        worker.parts.sidecar.on_peer(hello)
        assert process.pid == 0
        # Its address has been told already: who is early waits.
        early = asyncio.ensure_future(ask(as_seen_from_elsewhere(hello)))
        worker.parts.sidecar.on_peer(as_seen_from_elsewhere(hello))
        pid = process.pid
        worker.parts.sidecar.on_peer(as_seen_from_elsewhere(hello))
        assert runs(pid)
        assert process.pid == pid
        assert await early is Evidence.TICKING


async def test_pulse_works_without_a_sidecar() -> None:
    async with started(ALONE) as worker:
        hello = worker.parts.hello()
        assert len(hello.sidecar) == 1
        worker.parts.sidecar.on_peer(as_seen_from_elsewhere(hello))
        assert await ask_both(hello) == (Evidence.TICKING, Evidence.UNKNOWN)


async def test_sidecar_needs_tcp() -> None:
    async with started(Options(liveness=LivenessOptions(sidecar="on"))) as worker:
        assert worker.parts.sidecar.process is None
        assert await ask(worker.parts.hello()) is Evidence.TICKING


async def test_memory_transport_gives_no_evidence() -> None:
    async with Cluster(2) as (a, _):
        assert a.parts.hello().sidecar == ()
        assert await ask(a.parts.hello()) is Evidence.UNKNOWN


async def test_workers_of_a_process_have_a_sidecar_each() -> None:
    options = replace(TCP, network=replace(TCP.network, listen=None))
    async with Cluster(2, network="tcp", options=options) as (a, b):
        assert a.parts.sidecar.process is not None
        assert b.parts.sidecar.process is not None
        assert a.parts.sidecar.process.pid != b.parts.sidecar.process.pid
        for worker in (a, b):
            assert set(await ask_both(worker.parts.hello())) == {Evidence.TICKING}


async def test_sidecar_answers_peers_with_the_secret_only() -> None:
    async with started() as worker:
        hello = as_seen_from_elsewhere(worker.parts.hello())
        assert await ask(hello, secret="another secret of it") is Evidence.UNREACHABLE


async def test_sidecar_answers_for_its_own_incarnation_only() -> None:
    async with started() as worker:
        hello = replace(worker.parts.hello(), incarnation=worker.incarnation + 1)
        assert set(await ask_both(hello)) == {Evidence.UNREACHABLE}


async def test_sidecar_process_is_small() -> None:
    """The process loads neither torch nor OpenSSL."""
    async with started() as worker:
        await ask(as_seen_from_elsewhere(worker.parts.hello()))
        assert worker.parts.sidecar.process is not None
        pid = worker.parts.sidecar.process.pid
        mapped = Path(f"/proc/{pid}/maps").read_text()  # noqa: ASYNC240
        assert "torch" not in mapped
        assert "libcrypto" not in mapped


async def test_ctrl_c_reaches_the_worker_and_not_its_sidecar() -> None:
    async with started() as worker:
        assert worker.parts.sidecar.process is not None
        pid = worker.parts.sidecar.process.pid
        assert os.getsid(pid) == pid
        for number in (1, 2):
            to = Path(f"/proc/{pid}/fd/{number}").readlink()  # noqa: ASYNC240
            assert str(to) == "/dev/null"


async def test_dead_sidecar_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async with started() as worker:
        process = worker.parts.sidecar.process
        assert process is not None
        pid = process.pid
        with caplog.at_level(logging.WARNING, "asyncrpc"):
            os.kill(pid, signal.SIGKILL)

            await until(lambda: not process.pid)
        assert not runs(pid)
        assert "has ended with status -9" in caplog.text
        # The worker answers itself, as long as its loop runs.
        evidence = await ask(as_seen_from_elsewhere(worker.parts.hello()))
        assert evidence is Evidence.TICKING


async def test_failed_start_leaves_no_process() -> None:
    options = replace(TCP, rendezvous_timeout_s=0.1)
    worker = Worker(
        "w", rank=0, rendezvous=asyncrpc.LocalRendezvous(2), options=options
    )
    with pytest.raises(TimeoutError):
        await worker.__aenter__()


@pytest.mark.parametrize("option", ["yes", "", True])
def test_invalid_sidecar_option_is_refused(option: str) -> None:
    with pytest.raises(UsageError, match=r"LivenessOptions\.sidecar"):
        Options(liveness=LivenessOptions(sidecar=option))


@pytest.mark.parametrize(
    ("heartbeat_s", "lost_after_s"), [(0, 1), (-1, 1), (2, 3), (float("nan"), 1)]
)
def test_peer_must_have_time_to_answer(heartbeat_s: float, lost_after_s: float) -> None:
    with pytest.raises(UsageError, match="Options"):
        Options(
            liveness=LivenessOptions(heartbeat_s=heartbeat_s, lost_after_s=lost_after_s)
        )


# --- what a HELLO may say ------------------------------------------------------------


@pytest.mark.parametrize(
    "sidecar",
    [
        (),
        ("pulse://1",),
        ("pulse://-1/1/1/1",),
        ("pulse://1/x/1/1",),
        ("tcp://",),
        ("tcp://127.0.0.1:99999",),
        ("file:///etc/passwd", "uds:///tmp/x", ""),
    ],
)
async def test_invalid_addresses_give_no_evidence(sidecar: tuple[str, ...]) -> None:
    async with started(ALONE) as worker:
        hello = replace(worker.parts.hello(), sidecar=sidecar)
        assert await ask_both(hello) == (Evidence.UNKNOWN, Evidence.UNKNOWN)


async def test_kernel_may_report_a_process_without_a_pulse() -> None:
    child = await asyncio.create_subprocess_exec("true")
    await child.wait()
    async with started(ALONE) as worker:
        hello = replace(worker.parts.hello(), sidecar=(), pid=child.pid)
        for credentials_pid, evidence in (
            (child.pid, Evidence.GONE),
            (child.pid + 1, Evidence.UNKNOWN),  # of a proxy, say
            (0, Evidence.UNKNOWN),  # out of sight
        ):
            answer = await evidence_of(
                hello, credentials_pid=credentials_pid, secret=None, timeout_s=1
            )
            assert answer is evidence


async def test_process_of_another_namespace_is_ignored() -> None:
    async with started(ALONE) as worker:
        address = PulseAddress.find(worker.parts.hello().sidecar)
        assert address is not None
        elsewhere = replace(address, namespace=address.namespace + 1)
        hello = replace(worker.parts.hello(), sidecar=(str(elsewhere),))
        assert await ask(hello) is Evidence.UNKNOWN


# --- those who ask -------------------------------------------------------------------


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """Somewhere that a connection leads to, and nothing comes back from."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"tcp://127.0.0.1:{listening.getsockname()[1]}"


async def test_first_answering_address_suffices() -> None:
    async with started() as worker:
        with silent_listener() as silent:
            real = worker.parts.hello().sidecar
            hello = replace(
                worker.parts.hello(), sidecar=(silent, "tcp://[::1]:1", *real)
            )
            evidence = await ask(as_seen_from_elsewhere(hello), timeout_s=GENEROUS_S)
            assert evidence is Evidence.TICKING


async def test_silent_sidecar_is_unreachable() -> None:
    async with started() as worker:
        with silent_listener() as silent:
            hello = replace(worker.parts.hello(), sidecar=(silent,))
            evidence = await ask(as_seen_from_elsewhere(hello), timeout_s=0.2)
            assert evidence is Evidence.UNREACHABLE


async def test_cancelled_question_leaves_nothing_behind() -> None:
    async with started() as worker:
        with silent_listener() as silent:
            hello = replace(worker.parts.hello(), sidecar=(silent, silent))
            asking = asyncio.ensure_future(
                ask(as_seen_from_elsewhere(hello), timeout_s=GENEROUS_S)
            )
            await asyncio.sleep(0.05)
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking


async def test_strangers_are_not_answered_and_delay_no_peer() -> None:
    """Silent connections are closed, even when they take every place."""
    async with started() as worker:
        hello = as_seen_from_elsewhere(worker.parts.hello())
        address = Address.parse(worker.addresses[0])
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(CONNECTIONS_MAX):
                _, idle = await asyncio.open_connection(address.host, address.port)
                stack.callback(idle.close)
            assert await ask(hello, timeout_s=GENEROUS_S) is Evidence.TICKING
        for junk in (b"\xff" * query.QUERY_BYTES, b"GET / HTTP/1.1\r\n" * 20):
            reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.write(junk)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.transport.abort()
        assert await ask(hello) is Evidence.TICKING


async def test_concurrent_questions_are_all_answered() -> None:
    async with started() as worker:
        hello = as_seen_from_elsewhere(worker.parts.hello())
        asked = (ask(hello, timeout_s=GENEROUS_S) for _ in range(200))
        assert set(await asyncio.gather(*asked)) == {Evidence.TICKING}


# --- a worker of another process -----------------------------------------------------


@asynccontextmanager
async def process(
    transport: str = "tcp",
) -> AsyncIterator[tuple[Worker, ProcessCluster, Hello]]:
    """A worker here, and one in a process of its own, with its HELLO."""
    secret = secrets.token_hex()
    cluster = processes(
        "b",
        transport=transport,
        options=Options(
            secret=secret, liveness=LivenessOptions(sidecar="on"), drain_timeout_s=1.0
        ),
    )
    async with cluster as a:
        hello = (await a.parts.link_to("b")).connection.peer
        assert hello is not None
        yield a, cluster, hello


async def until_seen(
    a: Worker, hello: Hello, expected: Evidence, *, is_far: bool = True
) -> None:
    """Wait until this is what is seen, here and elsewhere."""
    seen: set[Evidence] = set()
    views = (hello, as_seen_from_elsewhere(hello)) if is_far else (hello,)
    async with asyncio.timeout(GENEROUS_S):
        while seen != {expected}:
            await asyncio.sleep(0.02)
            seen = {await ask(view, secret=str(a.options.secret)) for view in views}


Stall = Callable[[str], object]


class TestProcesses:
    loops = {"asyncio": asyncio.SelectorEventLoop}  # noqa: RUF012

    @pytest.mark.parametrize(
        "stall", [blocking.hold_interpreter, blocking.block_loop], ids=["lock", "loop"]
    )
    async def test_blocked_process_is_busy(self, stall: Stall, tmp_path: Path) -> None:
        gate = str(tmp_path / "gate")
        os.mkfifo(gate)
        async with process() as (a, _, hello):
            await until_seen(a, hello, Evidence.TICKING)
            stalled = a.parts.start_call("b", stall, (gate,))
            await until_seen(a, hello, Evidence.BUSY)
            blocking.let_go(gate)
            await stalled
            await until_seen(a, hello, Evidence.TICKING)

    async def test_stopped_process_is_seen_as_stopped(self) -> None:
        async with process() as (a, cluster, hello):
            await until_seen(a, hello, Evidence.TICKING)
            os.kill(cluster.pid("b"), signal.SIGSTOP)
            try:
                await until_seen(a, hello, Evidence.STOPPED)
            finally:
                os.kill(cluster.pid("b"), signal.SIGCONT)
            await until_seen(a, hello, Evidence.TICKING)

    async def test_killed_process_is_seen_as_gone(self) -> None:
        async with process() as (a, cluster, hello):
            pid = await a.peer("b").call(blocking.sidecar_pid)
            cluster.kill("b")
            try:
                await until_seen(a, hello, Evidence.GONE)
                assert runs(pid)  # to tell of it
            finally:
                os.kill(pid, signal.SIGKILL)

    async def test_unix_socket_gives_evidence_on_its_host_only(self) -> None:
        async with process("uds") as (a, cluster, hello):
            await until_seen(a, hello, Evidence.TICKING, is_far=False)
            cluster.kill("b")
            await until_seen(a, hello, Evidence.GONE, is_far=False)
            assert await ask(as_seen_from_elsewhere(hello)) is Evidence.UNKNOWN


# --- one port ------------------------------------------------------------------------


async def test_calls_and_the_sidecar_share_one_port() -> None:
    async with started() as worker:
        assert set(worker.parts.hello().sidecar[1:]) == set(worker.addresses)
        assert len(worker.addresses) == 1


class TestOnePort:
    loops = {"asyncio": asyncio.SelectorEventLoop}  # noqa: RUF012

    async def test_dialer_of_blocked_worker_waits(self, tmp_path: Path) -> None:
        """The sidecar accepts the connection, and passes it on unread."""
        gate = str(tmp_path / "gate")
        os.mkfifo(gate)
        async with process() as (a, _, hello):
            await until_seen(a, hello, Evidence.TICKING)
            stalled = a.parts.start_call("b", blocking.hold_interpreter, (gate,))
            await until_seen(a, hello, Evidence.BUSY)
            late = Worker(
                "late",
                rendezvous={"late": "tcp://127.0.0.1:0", "b": hello.addresses},
                options=replace(
                    a.options, network=NetworkOptions(listen=("tcp://127.0.0.1:0",))
                ),
            )
            async with late:
                calling = asyncio.create_task(late.peer("b").call(os.getpid))
                link = late.parts.directory.find("b")

                await until(lambda: bool(late.parts.directory.connections.live))
                await asyncio.sleep(3 * PATIENCE_S)  # it is with the sidecar by now
                assert link.link is None
                blocking.let_go(gate)
                await stalled
                assert await calling == hello.pid

    async def test_the_port_of_a_dead_worker_is_free_for_the_next(self) -> None:
        """Its sidecar, which answers for it there, gives it away when it is wanted."""
        async with process() as (a, cluster, hello):
            sidecar = await a.peer("b").call(blocking.sidecar_pid)
            cluster.kill("b")
            await until_seen(a, hello, Evidence.GONE)
            address = next(address for address in hello.addresses if "tcp" in address)
            port = Address.parse(address).port
            options = replace(
                TCP, network=NetworkOptions(listen=(f"tcp://127.0.0.1:{port}",))
            )
            async with started(options) as heir:
                assert Address.parse(heir.addresses[0]).port == port
                await until(lambda: not runs(sidecar))
