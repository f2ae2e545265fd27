"""Large payloads take other connections than small messages, and lose nothing there."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import torch

from asyncrpc import LimitOptions, NetworkOptions, Options, Worker, WorkerLostError
from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.links import lane_dialer
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.payloads import prefaulting
from asyncrpc.core.payloads.lanes import Lane, Lanes
from asyncrpc.core.payloads.machine.lanes import LanesState
from asyncrpc.core.payloads.prefaulting import Prefaulting
from asyncrpc.core.shm.slab import populate
from asyncrpc.core.wire.frames import CHUNK_BYTES
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import ConnectError, UsageError
from asyncrpc.testing import Cluster
from asyncrpc.testing.cluster import Wires
from asyncrpc.testing.loop import SimLoop
from asyncrpc.testing.network import Network
from tests.integration.core import remote
from tests.integration.core.groups import LIMIT_S, processes, until

MIB = 1 << 20


@asynccontextmanager
async def two(
    network: Wires | Network = "tcp", chosen: NetworkOptions | None = None
) -> AsyncIterator[tuple[Worker, Worker]]:
    lanes = 2 if network == "tcp" else None  # on one host it would be a single lane
    options = Options(
        drain_timeout_s=2.0,
        network=chosen or NetworkOptions(bulk_lanes=lanes),
        limits=LimitOptions(shared_memory_bytes=0),
    )
    async with Cluster(2, network=network, options=options) as workers:
        yield workers[0], workers[1]


def lanes_of(worker: Worker, to: str) -> Lanes:
    link = worker.parts.directory.find(to).link
    assert link is not None
    assert link.connection.lanes is not None
    return link.connection.lanes


def counted(monkeypatch: pytest.MonkeyPatch) -> Counter[Lane]:
    """Count the bytes that each lane reads."""
    read: Counter[Lane] = Counter()
    advance = Lane.advance

    def count(self: Lane, nbytes: int) -> None:
        read[self] += nbytes
        advance(self, nbytes)

    monkeypatch.setattr(Lane, "advance", count)
    return read


def is_empty(lanes: Lanes) -> bool:
    return not len(lanes.arrivals)


def numbers(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32)


def both_ways(a: Worker, b: Worker, large: list[torch.Tensor]) -> list[Any]:
    calls = [a.parts.start_call("b", remote.echo, (tensor,)) for tensor in large]
    return calls + [b.parts.start_call("a", remote.echo, (tensor,)) for tensor in large]


class TestOpening:
    @pytest.mark.parametrize(
        ("network", "count", "host"),
        [("tcp", 1, HOST_ID), ("tcp", 2, "another"), ("uds", 1, "another")],
    )
    async def test_first_large_payload_opens_the_lanes(
        self, network: Wires, count: int, host: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(lane_dialer, "HOST_ID", host)
        async with two(network, NetworkOptions(bulk_lanes=None)) as (a, b):
            await a.peer("b").call(remote.add, torch.ones(1000))
            assert lanes_of(a, "b").state is LanesState.NONE
            large = numbers(MIB)
            assert torch.equal(await a.peer("b").call(remote.echo, large), large)
            assert lanes_of(a, "b").state is LanesState.UP
            await a.peer("b").call(remote.echo, large)
            assert len(lanes_of(a, "b").lanes) == len(lanes_of(b, "a").lanes) == count

    async def test_acceptor_asks_for_lanes(self) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.add, 1)
            large = numbers(MIB)
            assert torch.equal(await b.peer("a").call(remote.echo, large), large)
            assert lanes_of(b, "a").state is LanesState.UP
            assert lanes_of(a, "b").state is LanesState.UP

    @pytest.mark.parametrize("network", ["tcp", "uds", "mem"])
    async def test_lanes_copy_nothing_in_user_space(self, network: Wires) -> None:
        async with two(network) as (a, b):
            for _ in range(2):
                await a.peer("b").call(remote.total, numbers(4 * MIB))
            (link,) = b.parts.directory.links
            assert link.connection.bytes_copied == 0

    async def test_options_switch_lanes_off(self) -> None:
        async with two(chosen=NetworkOptions(bulk_lanes=0)) as (a, b):
            large = numbers(MIB)
            assert torch.equal(await a.peer("b").call(remote.echo, large), large)
            assert torch.equal(await b.peer("a").call(remote.echo, large), large)
            assert not lanes_of(a, "b").lanes

    async def test_invalid_number_of_lanes_is_refused(self) -> None:
        for count in (-1, 17):
            with pytest.raises(UsageError, match=r"bulk_lanes must be 0 to 16"):
                Options(network=NetworkOptions(bulk_lanes=count))

    @pytest.mark.parametrize("who", ["dialer", "acceptor"])
    async def test_payloads_use_the_connection_when_lanes_fail(
        self, monkeypatch: pytest.MonkeyPatch, who: str
    ) -> None:
        async def dial(*_: object) -> None:
            raise ConnectError("a wall")

        async with two() as (a, b):
            await a.peer("b").call(remote.add, 1)
            sender, to = (a, "b") if who == "dialer" else (b, "a")
            monkeypatch.setattr(a.parts.directory.lane_dialer, "dial", dial)
            large = numbers(MIB)
            assert torch.equal(await sender.peer(to).call(remote.echo, large), large)
            assert lanes_of(sender, to).state is LanesState.OFF
            assert torch.equal(await sender.peer(to).call(remote.echo, large), large)

    async def test_payload_does_not_wait_long_for_opening_lanes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("asyncrpc.core.payloads.lanes.OPENING_WAIT_S", 0.01)
        async with two() as (a, _):
            go_on = asyncio.Event()
            dial = a.parts.directory.lane_dialer.dial  # over a slow network

            async def slowly(*where: Any) -> None:
                await go_on.wait()
                await dial(*where)

            monkeypatch.setattr(a.parts.directory.lane_dialer, "dial", slowly)
            large = numbers(MIB)
            assert torch.equal(await a.peer("b").call(remote.echo, large), large)
            lanes = lanes_of(a, "b")
            assert lanes.state is LanesState.LATE
            go_on.set()
            await until(lambda: len(lanes.lanes) == 2, 0.0)
            opened = lanes.arrivals.opened
            assert torch.equal(await a.peer("b").call(remote.echo, large), large)
            assert lanes.arrivals.opened == opened + 1

    async def test_call_cancelled_while_lanes_open_is_never_sent(self) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.add, 1)
            call = a.parts.start_call("b", remote.total, (numbers(MIB),))
            assert lanes_of(a, "b").state is LanesState.OPENING
            call.cancel()
            assert await a.peer("b").call(remote.add, 1) == 2
            assert lanes_of(b, "a").arrivals.opened == 0

    async def test_a_lane_of_another_connection_is_refused(self) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.add, 1)
            (control,) = [link.connection for link in a.parts.directory.links]
            member = a.parts.directory.find("b").member
            own = a.incarnation

            async def dial(token: int) -> str:
                def introduce(connection: Connection) -> None:
                    connection.hello(a.parts.hello(expects="b", lane=token))

                def on_hello(connection: Connection, _: object) -> None:
                    connection.open_to(SILENT)

                connection = a.parts.directory.connections.make(
                    Role.DIALER, introduce, on_hello
                )
                (address, *_) = a.parts.directory.routes.to(member)
                await a.parts.connectors["tcp"].connect(address, connection)
                hello = await connection.opened
                connection.close()
                return hello.verdict

            assert await dial(control.token ^ 2) == "no such connection"
            a.parts.identity.incarnation = type(own)(int(own) ^ 2)
            assert await dial(control.token) == "no such connection"
            a.parts.identity.incarnation = own
            assert not lanes_of(b, "a").lanes
            assert await a.peer("b").call(remote.add, 1) == 2


class TestStriping:
    async def test_payload_is_striped_over_lanes(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = counted(monkeypatch)
        async with two(chosen=NetworkOptions(bulk_lanes=3)) as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            await until(lambda: len(lanes_of(b, "a").lanes) == 3, 0.0)
            read.clear()
            await a.peer("b").call(remote.total, numbers(16 * MIB))
            assert set(read) == set(lanes_of(b, "a").lanes)
            assert min(read.values()) > CHUNK_BYTES
            assert sum(read.values()) == 64 * MIB + 40 * (64 * MIB // CHUNK_BYTES)

    @pytest.mark.parametrize("network", ["tcp", "uds", "mem"])
    async def test_concurrent_payloads_both_ways_arrive(self, network: Wires) -> None:
        async with two(network) as (a, b):
            large = [numbers((number + 1) * MIB) for number in range(6)]
            calls = both_ways(a, b, large)
            small = [await a.peer("b").call(remote.add, number) for number in range(9)]
            assert small == list(range(1, 10))
            for call, tensor in zip(calls, large * 2, strict=True):
                assert torch.equal(await call, tensor)

    async def test_stream_items_travel_on_lanes(self) -> None:
        async with two() as (a, _):
            items = [
                tensor async for tensor in a.peer("b").stream(remote.tensors, 9, MIB)
            ]
            assert [len(item) for item in items] == [4, MIB] * 4 + [4]
            assert lanes_of(a, "b").arrivals.opened == 4

    @pytest.mark.parametrize("seed", range(10))
    def test_payloads_survive_reordering_and_loss(self, seed: int) -> None:
        """Chunks overtake each other, and the messages that they belong to."""

        async def scenario(network: Network) -> None:
            network.between("a", "b").delay(network.rng.choice([0.0001, 0.01, 0.1]))
            network.between("a", "b").lose(network.rng.choice([0.0, 0.05]))
            async with two(network, NetworkOptions(bulk_lanes=3)) as (a, b):
                large = [numbers((number + 1) * 99_999) for number in range(8)]
                calls = both_ways(a, b, large)
                for call in calls[::3]:
                    call.cancel()
                for number, call in enumerate(calls):
                    if number % 3:
                        assert torch.equal(await call, large[number % 8])
                assert len(lanes_of(a, "b").lanes) == 3
                for lanes in (lanes_of(a, "b"), lanes_of(b, "a")):
                    await until(partial(is_empty, lanes), 1.0)

        with asyncio.Runner(loop_factory=SimLoop) as runner:
            runner.run(scenario(Network(seed, runner.get_loop())))


class TestGivingUp:
    @pytest.mark.parametrize("network", ["tcp", "uds", "mem"])
    async def test_the_rest_of_a_request_is_not_sent(
        self, network: Wires, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        read = counted(monkeypatch)
        async with two(network) as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            read.clear()
            call = a.parts.start_call("b", remote.total, (numbers(64 * MIB),))
            await until(lambda: bool(read), 0.0)
            call.cancel()
            assert await a.peer("b").call(remote.add, 1) == 2
            await until(lambda: not len(lanes_of(b, "a").arrivals), 0.0)
            assert read.total() < 128 * MIB
            assert await a.peer("b").call(remote.total, torch.ones(MIB)) == MIB

    async def test_rest_of_result_not_sent(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            read = counted(monkeypatch)
            call = a.parts.start_call("b", torch.ones, (64 * MIB,))
            await until(lambda: bool(read), 0.0)
            call.cancel()
            assert await a.peer("b").call(remote.add, 1) == 2
            await until(lambda: not len(lanes_of(a, "b").arrivals), 0.0)
            assert read.total() < 128 * MIB
            assert not b.parts.active


class TestFreshMemory:
    """Long memory gets its pages from a thread, while the payload arrives."""

    @pytest.mark.parametrize("network", ["tcp", "uds"])
    async def test_lanes_wait_for_memory_pages_and_lose_nothing(
        self, network: Wires, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        begun, waits = threading.Event(), threading.Event()
        is_ready = Prefaulting.is_ready

        def asked(self: Prefaulting, memory: memoryview, tell: Any) -> bool:
            answer = is_ready(self, memory, tell)
            if not answer:
                waits.set()
            elif self._blocks:  # read nothing before the thread has begun
                assert begun.wait(LIMIT_S)
            return answer

        def late(address: int, nbytes: int) -> bool:
            """Make pages once a lane waits for them, in a thread."""
            begun.set()
            assert waits.wait(LIMIT_S)
            return populate(address, nbytes)

        async with two(network) as (a, _):
            await a.peer("b").call(remote.total, numbers(MIB))  # opens them
            monkeypatch.setattr(prefaulting, "populate", late)
            monkeypatch.setattr(Prefaulting, "is_ready", asked)
            large = torch.randint(0, 256, (24 * MIB + 5,), dtype=torch.uint8)
            whole, part = await a.peer("b").call(
                remote.echo, [large, large[3:].clone()]
            )
            assert torch.equal(whole, large)
            assert torch.equal(part, large[3:])
            assert waits.is_set()

    async def test_lanes_do_not_wait_while_all_threads_are_busy(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A function that waits for the payload may have the last thread."""
        options = Options(
            threads=1,
            network=NetworkOptions(bulk_lanes=1),
            limits=LimitOptions(shared_memory_bytes=0),
        )
        watch = remote.Watch()
        monkeypatch.setitem(remote.watches, "fresh memory", watch)
        async with Cluster(2, network="tcp", options=options) as (a, _):
            waiting = a.parts.start_call("b", remote.pass_gate, ("fresh memory",))
            await watch.begun.wait()
            large = torch.ones(16 * MIB, dtype=torch.uint8)
            added = await a.peer("b").call(remote.add_on_loop, large)
            assert torch.equal(added, large + 1)
            watch.gate.set()
            assert await waiting == "through"


class TestTheEnd:
    async def test_broken_lane_breaks_the_link_with_a_reason(self) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            call = a.parts.start_call("b", remote.total, (numbers(64 * MIB),))
            lanes_of(b, "a").lanes[0].connection.fail(ConnectError("cut"))
            with pytest.raises(WorkerLostError, match=r"a lane to .* broke"):
                await call
            assert await a.peer("b").call(remote.total, torch.ones(MIB)) == MIB

    async def test_peer_that_closes_its_lanes_is_lost(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("asyncrpc.core.payloads.lanes.LINGER_S", 0.01)
        async with two() as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            remote.watches["w"] = watch = remote.Watch()
            call = a.parts.start_call("b", remote.wait_for_ever, ("w",))
            await watch.begun.wait()
            for lane in lanes_of(b, "a").lanes:
                lane.connection.close()
            with pytest.raises(WorkerLostError, match="closed its lanes"):
                await call
            await watch.ended.wait()
            del remote.watches["w"]

    async def test_invalid_chunk_breaks_the_link(self) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            link = b.parts.directory.links[0]
            lanes_of(a, "b").lanes[0].stream.write_now(b"junk" * 10)
            await link.connection.ended
            assert "a frame on a lane must be DATA" in link.lost_because

    async def test_large_answer_of_a_closing_worker_arrives(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            read = counted(monkeypatch)
            call = a.parts.start_call("b", make_large, (64 * MIB,))
            await until(lambda: bool(read), 0.0)
            assert not b.parts.active
            await b.shutdown()
            assert len(await call) == 64 * MIB

    async def test_killed_peer_closes_its_lanes(self) -> None:
        options = Options(limits=LimitOptions(shared_memory_bytes=0))
        async with (cluster := processes("b", transport="tcp", options=options)) as a:
            await a.peer("b").call(remote.total, numbers(MIB))
            connections = [lane.connection for lane in lanes_of(a, "b").lanes]
            call = a.parts.start_call("b", remote.total, (numbers(64 * MIB),))
            cluster.kill("b")
            with pytest.raises(WorkerLostError):
                await call
            await asyncio.wait_for(asyncio.gather(*(c.ended for c in connections)), 5)

    async def test_idle_lanes_do_not_keep_a_worker_from_ending(self) -> None:
        async with two() as (a, b):
            await a.peer("b").call(remote.total, numbers(MIB))
            connections = [lane.connection for lane in lanes_of(a, "b").lanes]
            assert connections
            await asyncio.gather(a.shutdown(), b.shutdown())
            assert a.is_closed
            assert b.is_closed
            assert all(connection.ended.done() for connection in connections)


async def make_large(nbytes: int) -> torch.Tensor:
    return torch.ones(nbytes, dtype=torch.uint8)
