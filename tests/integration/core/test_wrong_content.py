# ruff: noqa: SLF001  (what a worker keeps is nowhere public)
"""What is wrong with the content of a message costs that message, and nothing else.

One of two real workers sends the other every message there is with everything that may
be wrong with it.  Meanwhile a call is in flight between the two, which goes on; after
it their connection is the same, a training step and a collective work, and no table has
grown.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import asyncrpc
from asyncrpc import Group, NetworkOptions, Options, Worker, WorkerLostError
from asyncrpc.autograd import backward, context
from asyncrpc.core.links.link import Link
from asyncrpc.core.membership.messages import fields_of
from asyncrpc.core.parts import Parts
from asyncrpc.core.wire.frames import FrameKind, pack_head
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import Cluster, acting_as
from tests import raw_messages
from tests.inner_state import optimizers_here, routes_of, series_of, turns_of
from tests.integration.core.test_liars import Layer
from tests.integration.core.wrong_content import JUNK, examples, spoiled

SERVICES = (
    *("rref", "autograd", "optim", "collectives", "membership", "rounds", "relay"),
    *("memory", "regions", "inspection", "rendezvous", "code"),
)
LIMIT_S = 60.0  # for what would otherwise hang
_release: asyncio.Event


async def hold() -> str:
    """Run until the test lets it end."""
    await _release.wait()
    return "held"


class Training:
    """What must go on working: a layer on the victim, its optimizer, a group."""

    def __init__(self, workers: list[Worker]) -> None:
        self.a, self.b = workers
        self.steps = 0

    async def begin(self) -> None:
        with acting_as(self.a):
            self.layer = self.a.peer("b").remote(Layer)
            parameter = await self.layer.rpc_async().parameter()
            self.optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
        self.groups = [Group(worker, timeout_s=LIMIT_S) for worker in (self.a, self.b)]
        await self.go_on()

    async def go_on(self) -> None:
        """Take a step whose result is known, and reduce a tensor."""
        with acting_as(self.a):
            async with context() as ctx:
                x = torch.ones(3)
                await backward(ctx, [(await self.layer.rpc_async().forward(x)).sum()])
                await self.optimizer.step(ctx)
            self.steps += 1
            weight = await self.layer.rpc_async().value()
        assert weight.tolist() == [1.0 - 0.5 * self.steps] * 3
        tensors = [torch.full((5,), 1.0), torch.full((5,), 2.0)]
        await asyncio.gather(
            *(
                group.all_reduce(each)
                for group, each in zip(self.groups, tensors, strict=True)
            )
        )
        assert all(each.tolist() == [3.0] * 5 for each in tensors)


def sizes(worker: Worker) -> dict[str, Any]:
    """Count all that a worker keeps because of others."""
    gc.collect()
    service: Any = worker.parts.service
    link: Any = worker.parts.directory.links[0]
    rounds = service("rounds")
    groups = service("collectives")._groups.values()
    return {
        "references": service("rref").counts(),
        "contexts": service("autograd").open_contexts,
        "passes": service("autograd").running_passes,
        "optimizers": optimizers_here(service("optim")),
        "turns": turns_of(service("optim")),
        "groups": sum(bool(group.members) for group in groups),
        "unknown groups": sum(not group.members for group in groups) > 1,
        "members": [
            fields_of(record) for record in service("membership").table.records
        ],
        "known": len(service("membership").table),
        "series": len(series_of(rounds.table)) if rounds.size else 0,
        "regions": len(service("regions")),
        "slabs": len(worker.parts.memory.slabs),
        "served": len(link.served),
        "pending": len(link.pending),
        "functions": len(link.heads.functions._names),
        "active": worker.parts.active,
    }


async def until_same(worker: Worker, before: dict[str, Any]) -> None:
    """Wait until a worker keeps what it kept before: no event tells of that."""
    try:
        async with asyncio.timeout(LIMIT_S):
            while sizes(worker) != before:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    except TimeoutError:
        now = sizes(worker)
        grown = {key: (before[key], now[key]) for key in now if now[key] != before[key]}
        pytest.fail(f"what has not come back: {grown}")


@asynccontextmanager
async def attacked(wire: Any = "uds") -> AsyncIterator[tuple[Worker, Worker, Link]]:
    """Give an attacker, its victim and the link between them; then see what is left."""
    global _release  # noqa: PLW0603  (of this test's loop)
    _release = asyncio.Event()
    options = Options(
        drain_timeout_s=2.0,
        rpc_timeout_s=LIMIT_S,
        network=NetworkOptions(connect_timeout_s=1.0),
    )
    async with Cluster(2, network=wire, options=options) as (a, b):
        training = Training([a, b])
        await training.begin()
        peer = a.peer("b")
        held = [asyncio.ensure_future(peer.call(hold))]
        held.append(asyncio.ensure_future(b.peer("a").call(hold)))
        assert await peer.call(len, "ab") == 2
        link = await a.parts.link_to("b")
        before, transport = sizes(b), link.connection.stream.transport
        try:
            yield a, b, link
        except BaseException:
            _release.set()
            await asyncio.gather(*held)
            raise
        assert await peer.call(len, "abc") == 3  # so all that was sent has arrived
        await until_same(b, before)
        _release.set()
        async with asyncio.timeout(LIMIT_S):
            assert await asyncio.gather(*held) == ["held", "held"]
            await training.go_on()
        assert not link.is_lost
        assert await a.parts.link_to("b") is link
        assert link.connection.stream.transport is transport  # nor has it been resumed
        for group in training.groups:
            group.close()
        del training
        with acting_as(a):
            gc.collect()


def methods_of(worker: Worker) -> Iterable[tuple[str, str, str]]:
    """List service, kind and method of all that a worker can be told."""
    for name in SERVICES:
        worker.parts.service(name)  # which loads it
        for route in routes_of(worker.parts.router, name):
            yield name, "request" if route.is_answered else "notice", route.method


async def test_examples_cover_all_messages() -> None:
    """A new method, or a new service, has to come here to be attacked."""
    async with Cluster(2) as (a, b):
        known = {(service, method) for service, _, method in methods_of(b)}
        assert known == set(examples(a, b))
        assert {served.name for served in b.parts.services} == {*SERVICES, "presence"}
        assert not routes_of(b.parts.router, "presence")


async def refuse(link: Link, service: Any, method: Any, value: Any) -> str:
    """Ask for something; return the text of the error, empty if it was answered."""
    try:
        async with asyncio.timeout(LIMIT_S):
            await raw_messages.request(link, service, method, value)
    except WorkerLostError:
        raise
    except asyncrpc.AsyncRpcError as error:
        return str(error)
    return ""


def tell(link: Link, service: Any, method: Any, value: Any) -> None:
    """Send a notice, which `Link.notify` would not do with tensors."""
    encoded = link.host.codec.encode(value)
    link.connection.send(
        FrameKind.NOTICE,
        0,
        head=pack_head([service, method]),
        control=encoded.control,
        buffers=encoded.buffers,
    )


async def ask_wrongly(link: Link, service: str, method: str, example: Any) -> None:
    """Ask for something in every wrong way; each is answered, and told why."""
    refused = 0
    for value in JUNK:
        said = await refuse(link, service, method, value)
        refused += bool(said)
        is_blamed = "worker 'a' sent" in said and f"'{service}.{method}'" in said
        assert is_blamed or not said, said
    # A message without fields may be any array: what follows its fields is ignored.
    has_fields = example != [] and method not in {"ping", "members"}
    assert refused >= len(JUNK) - 2 or not has_fields
    for value in spoiled(example):
        await refuse(link, service, method, value)
    for _ in range(2):
        await refuse(link, service, method, example)


async def tell_wrongly(
    link: Link, service: str, method: str, example: Any, log: pytest.LogCaptureFixture
) -> None:
    """Say something in every wrong way; each is dropped, and the log says why."""
    log.clear()
    for value in JUNK:
        tell(link, service, method, value)
    assert isinstance(link.host, Parts)
    await link.host.peer("b").call(len, "a")
    refused = log.text.count(f"notice of 'a' could not be taken: {service}.{method}")
    assert refused >= len(JUNK) - 2
    for value in (*spoiled(example), example, example):
        tell(link, service, method, value)


@pytest.mark.parametrize("service", SERVICES)
async def test_wrong_content_costs_its_message_alone(
    service: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with attacked() as (a, b, link):
        known = examples(a, b)
        for name, kind, method in methods_of(b):
            example = known[name, method]
            if name == service and kind == "request":
                await ask_wrongly(link, name, method, example)
            elif name == service:
                await tell_wrongly(link, name, method, example, caplog)


@pytest.mark.parametrize(
    "services", [SERVICES, ("unheard of", "", 5, None, ["rref"])], ids=["known", "not"]
)
async def test_unknown_method_refused(
    services: Any, caplog: pytest.LogCaptureFixture
) -> None:
    methods = ("", "unheard of", "__class__", "on_request", 5, None, [1])
    async with attacked("mem") as (a, _, link):
        for service, method in itertools.product(services, methods):
            said = await refuse(link, service, method, [1, 2])
            assert "there is no service" in said or "does not know" in said, said
            tell(link, service, method, [1, 2])
        await a.peer("b").call(len, "a")
        assert caplog.text.count("could not be taken") == 7 * len(services)


# Values that any worker may send, as deep and wide as Hypothesis likes.
SENDABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=20)
    | st.just(torch.ones(2)),
    lambda inner: (
        st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=3), inner)
    ),
    max_leaves=20,
)


async def test_random_content_is_refused() -> None:
    """Hypothesis draws the values; all of them go over one connection."""
    drawn: list[Any] = []

    @settings(max_examples=30, suppress_health_check=list(HealthCheck))
    @given(SENDABLE)
    def draw(value: Any) -> None:
        drawn.append(value)

    await asyncio.to_thread(draw)
    async with attacked() as (_, b, link):
        for name, kind, method in methods_of(b):
            for value in drawn:
                if kind == "request":
                    await refuse(link, name, method, value)
                else:
                    tell(link, name, method, value)
