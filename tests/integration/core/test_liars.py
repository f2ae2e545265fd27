"""Among honest workers one lies, with every message at hand: nothing honest fails.

Two members and a guest call each other, hold references, train and reduce.  The liar is
a member, a guest, an observer, or a peer that knows the secret and has never joined.
Once it has left, the honest ones know each other, and nobody else, as before.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import torch

import asyncrpc
from asyncrpc import AsyncRpcError, Group, LocalRendezvous, Policy, RRef, Worker
from asyncrpc.autograd import backward, context
from asyncrpc.core.services.schema import Request
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.parallel.collectives.service import group_id
from asyncrpc.testing import acting_as
from asyncrpc.tools.inspection.observer import Observer
from tests.docs.test_wire_tables import MESSAGES
from tests.fuzz.choices import Choices
from tests.integration.core.groups import LIMIT_S, started, until
from tests.integration.core.test_guests import INSIDE, OPTIONS, door_of
from tests.lies import Facts, Liar
from tests.raw_messages import RawMessage

TURNS = 300  # what a liar says
FRAMES_EACH = 20  # so many things that a liar sends, one is a frame without a service
BYTES = 1024  # from which a liar draws one of them
ANSWER_S = 0.05  # a liar does not wait for longer
LIARS = ("member", "guest", "observer", "unjoined")


@asyncrpc.expose
def add(number: int, other: int) -> int:
    return number + other


@asyncrpc.expose
async def count_to(number: int) -> AsyncIterator[int]:
    for item in range(number):
        yield item


@asyncrpc.expose
class Layer:
    """One parameter."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    def parameter(self) -> RRef[torch.nn.Parameter]:
        return RRef(self.weight)

    def value(self) -> torch.Tensor:
        return self.weight.detach().clone()


class Honest:
    """Two members and a guest, and what they do all the time."""

    def __init__(
        self, ps: Worker, m: Worker, laptop: Worker, *, is_whole: bool
    ) -> None:
        self.is_whole = is_whole  # whether every rank is honest
        self.ps, self.m, self.laptop = self.all = (ps, m, laptop)
        self.steps = 0

    async def begin(self) -> None:
        """Make what lasts: a layer on a member, its optimizer, a group."""
        with acting_as(self.ps):
            self.layer: Any = self.ps.peer("m").remote(Layer)
            parameter = await self.layer.rpc_async().parameter()
            self.optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
        names = [worker.name for worker in self.all]
        self.groups = [
            Group(worker, members=names, timeout_s=LIMIT_S) for worker in self.all
        ]
        self.facts = Facts(self.all)
        self.facts.numbers += [
            *(group_id("", names, serial) for serial in range(3)),
            *(group_id("", names[:2], serial) for serial in range(3)),
        ]
        self.facts.ids += [self.layer.rref_id, parameter.rref_id]
        await self.work()

    async def work(self) -> None:
        """Do a bit of everything, and see that it is right."""
        async with asyncio.timeout(LIMIT_S):
            for caller in self.all:
                for callee in self.all:
                    assert await caller.peer(callee.name).call(add, 1, 2) == 3
            assert await self.ps.peer(1).call(add, 3, 4) == 7
            assert await self.m.peer(0).call(add, 3, 4) == 7
            items = [item async for item in self.m.peer("ps").stream(count_to, 5)]
            assert items == list(range(5))
            await self._train()
            await self._reduce(self.groups)
            early = [Group(self.ps, members=["ps", "m"], timeout_s=LIMIT_S)]
            early.append(Group(self.m, members=["ps", "m"], timeout_s=LIMIT_S))
            await self._reduce(early)
            for group in early:
                group.close()
            if self.is_whole:
                await asyncio.gather(self.ps.barrier(), self.m.barrier())

    async def _train(self) -> None:
        with acting_as(self.ps):
            async with context() as ctx:
                self.facts.ids.append(ctx.id)
                y = await self.layer.rpc_async().forward(torch.ones(3))
                await self.layer.rpc_async().value()
                await backward(ctx, [y.sum()])
                await self.optimizer.step(ctx)
            self.steps += 1
            weight = await self.layer.rpc_async().value()
        assert weight.tolist() == [1.0 - 0.5 * self.steps] * 3

    async def _reduce(self, groups: list[Group]) -> None:
        tensors = [torch.ones(4) for _ in groups]
        pairs = zip(groups, tensors, strict=True)
        await asyncio.gather(*(group.all_reduce(each) for group, each in pairs))
        assert all(each.tolist() == [float(len(groups))] * 4 for each in tensors)

    def knows_each_other(self) -> bool:
        """Whether the records of the honest ones are true, and there are no others."""
        lives = {worker.name: worker.incarnation for worker in self.all}
        return all(
            {record.name: record.member.incarnation for record in _alive(worker)}
            == lives
            for worker in self.all
        )


def _alive(worker: Worker) -> list[Any]:
    service: Any = worker.parts.service("membership")
    return [record for record in service.table.records if record.is_alive]


@asynccontextmanager
async def honest_ones(
    policy: Policy, liar: str
) -> AsyncIterator[tuple[Honest, Worker]]:
    """Give the honest workers, and the last member, which may be the liar."""
    options = replace(
        INSIDE, policy=policy, allow=("torch.optim.sgd:SGD", "torch.nn.parameter:*")
    )
    meeting = LocalRendezvous(3 if liar == "member" else 2)
    ps, m = (
        Worker(name, rank=rank, rendezvous=meeting, options=options)
        for rank, name in enumerate(("ps", "m"))
    )
    members = [ps, m]
    if liar == "member":
        members.append(Worker("liar", rank=2, rendezvous=meeting, options=options))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(started(*members))
        laptop = _guest(ps, "laptop", policy)
        await stack.enter_async_context(started(laptop))
        for member in members:
            await member.find("laptop", timeout_s=LIMIT_S)
        honest = Honest(ps, m, laptop, is_whole=liar != "member")
        await honest.begin()
        yield honest, members[-1]


def _guest(gateway: Worker, name: str, policy: Policy) -> Worker:
    options = replace(
        OPTIONS,
        token=gateway.tokens.issue(valid_s=600.0, name=name),
        policy=policy,
        allow=("torch.optim.sgd:SGD", "torch.nn.parameter:*"),
    )
    return Worker(name, rendezvous=door_of(gateway), options=options)


Say = Callable[[Liar, Worker], Awaitable[None]]


def _message(liar: Liar) -> tuple[Any, bool]:
    """Return a message, and whether it is a request."""
    kind = liar.kind(MESSAGES)
    message: Any = RawMessage(kind.service, kind.method, liar.content(kind))
    message.read_answer = lambda _peer, value: value
    return message, issubclass(kind, Request)


def _is_plain(value: Any) -> bool:
    """Return whether an observer can send a value: no tensors."""
    try:
        msgpack.packb(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


@asynccontextmanager
async def _looking(honest: Honest) -> AsyncIterator[Say]:
    """Give how an observer of the members asks something; it leaves with the block."""
    async with Observer(INSIDE) as observer:
        observed = {
            worker.name: await observer.connect(worker.addresses[0])
            for worker in (honest.ps, honest.m)
        }

        async def ask(liar: Liar, to: Worker) -> None:
            message, is_request = _message(liar)
            if is_request and to.name in observed and _is_plain(message.pack()):
                await observed[to.name].ask(message, timeout_s=ANSWER_S)

        yield ask


@asynccontextmanager
async def _lying(worker: Worker, reached: Sequence[Worker]) -> AsyncIterator[Say]:
    """Give how a worker says something to those it reaches; it leaves then."""

    async def tell(liar: Liar, to: Worker) -> None:
        if to not in reached:
            return
        link = await worker.parts.link_to(to.name)
        if not liar.choices.below(FRAMES_EACH):
            frame, call_id, number = liar.frame()
            link.connection.send(frame, call_id, aux=number)
            return
        message, is_request = _message(liar)
        if not is_request:
            link.tell(message)
            return
        await asyncio.wait_for(link.ask(message), ANSWER_S)

    try:
        yield tell
    finally:
        await worker.shutdown(drain_timeout_s=0.0)


@asynccontextmanager
async def _liar(kind: str, honest: Honest, member: Worker) -> AsyncIterator[Say]:
    """Give how a liar of a kind says something to an honest worker."""
    members = (honest.ps, honest.m)
    if kind == "observer":
        async with _looking(honest) as say:
            yield say
        return
    reached: Sequence[Worker] = honest.all
    worker = member
    if kind == "guest":
        worker = _guest(honest.ps, "liar", Policy.TRUSTED)
        await worker.__aenter__()
    elif kind == "unjoined":
        reached = members
        known = {member.name: member.addresses for member in members}
        known["stranger"] = ("tcp://127.0.0.1:9",)
        worker = Worker("stranger", rendezvous=known, options=INSIDE)
        await worker.__aenter__()
    async with _lying(worker, reached) as say:
        yield say


async def _lie(honest: Honest, say: Say) -> None:
    chance = random.Random(0)
    for _ in range(TURNS):
        liar = Liar(honest.facts, Choices(chance.randbytes(BYTES)))
        with suppress(AsyncRpcError, TimeoutError):
            await say(liar, liar.one_of(honest.all))


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("kind", LIARS)
async def test_honest_work_survives_a_lying_peer(kind: str, policy: Policy) -> None:
    async with honest_ones(policy, kind) as (honest, member):
        async with _liar(kind, honest, member) as say:
            lying = asyncio.create_task(_lie(honest, say))
            while not lying.done():
                await honest.work()
            await lying
        await until(honest.knows_each_other)
        await honest.work()
