"""Nobody speaks for a third party: every row of the table, about whoever it may name.

Each message is sent to a worker by a member, a guest, an observer and a peer that has
never joined, about another member, another guest, the receiver itself, an absent name,
and a dead life.  Whatever it costs its sender, nothing of those that it names changes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import torch

from asyncrpc import AsyncRpcError, Policy, RRef, Worker, serving
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.core.services.schema import Message, Request
from asyncrpc.optim import DistributedOptimizer
from asyncrpc.testing import acting_as
from asyncrpc.tools.inspection.observer import Observer
from tests.docs.test_wire_tables import MESSAGES
from tests.integration.core.about import ABOUT, Subject, subject_of
from tests.integration.core.groups import until
from tests.integration.core.test_guests import INSIDE
from tests.integration.core.test_liars import (
    LIARS,
    Honest,
    Layer,
    _guest,
    _is_plain,
    honest_ones,
)
from tests.raw_messages import RawMessage

ANSWER_S = 0.5  # a sender does not wait for longer
DEAD = 0x0DEAD  # a life that has ended
Send = Callable[[type[Message], Any], Awaitable[None]]


def test_table_of_messages_is_complete() -> None:
    assert set(ABOUT) == set(MESSAGES)


class World:
    """What the honest workers have at the receiver, `ps`, and what becomes of it."""

    def __init__(self, honest: Honest, sender: str) -> None:
        self.honest = honest
        self.sender = sender  # its name: what is of it does not count
        self.receiver: Any = honest.ps
        self.subjects: list[Subject] = []
        self.values: list[RRef[Any]] = []
        self.contexts: list[Any] = []
        self.optimizers: list[DistributedOptimizer] = []

    async def begin(self, stack: AsyncExitStack) -> None:
        """Let each honest worker have a value, a context and an optimizer at `ps`."""
        honest = self.honest
        for worker in honest.all:
            # Values that it holds, and, for the receiver, one that another owns.
            to = "m" if worker is honest.ps else "ps"
            with acting_as(worker):
                layer: Any = worker.peer(to).remote(Layer)
                parameter = await layer.rpc_async().parameter()
                optimizer = DistributedOptimizer(torch.optim.SGD, [parameter], lr=0.5)
                await optimizer.step(await stack.enter_async_context(context()))
                ctx = await stack.enter_async_context(context())
                x = torch.ones(3, requires_grad=True)
                y = await layer.rpc_async().forward(x)
            self.values += [layer, parameter]
            self.optimizers.append(optimizer)
            self.contexts.append((worker, ctx, x, y))
            self.subjects.append(subject_of(worker, layer, ctx, list(honest.all)))
        m = self.subjects[1]
        self.subjects.append(m._replace(name="absent", incarnation=4141, rank=-1))
        self.subjects.append(m._replace(incarnation=DEAD))

    def kept(self) -> dict[str, Any]:
        """Return what the receiver keeps of everybody but the sender."""
        parts = self.receiver.parts
        references, optim = parts.references, parts.service("optim")
        table = parts.service("membership").table
        names = [worker.name for worker in self.honest.all]
        records = [table.get(name) for name in names]
        held = [value.rref_id for value in self.values]
        groups = parts.service("collectives")._groups.values()  # noqa: SLF001
        return {
            "values": [
                self._holders(references.holders(reference)) for reference in held
            ],
            "held": [references.user.get(reference) is not None for reference in held],
            "contexts": [
                parts.service("autograd").contexts.open.get(ctx.id) is not None
                for _, ctx, *_ in self.contexts
            ],
            "optimizers": sorted(
                (maker, number)
                for maker, number in optim._optimizers  # noqa: SLF001
                if maker in {worker.incarnation for worker in self.honest.all}
            ),
            "kept steps": list(optim._kept),  # noqa: SLF001
            "members": [
                record and (record.incarnation, record.is_alive, record.member)
                for record in records
            ],
            "links": [
                link is not None and not link.is_lost
                for link in (parts.directory.link_to(name) for name in names[1:])
            ],
            "groups": [
                (group.id, group.lost, group.machine.operations.begun)
                for group in groups
                if group.members
            ],
            "draining": self.receiver.is_draining,
        }

    def _holders(self, holders: dict[str, int]) -> dict[str, int]:
        return {name: n for name, n in holders.items() if name != self.sender}

    async def end(self) -> None:
        """Do with everything what it is for."""
        for entry, optimizer in zip(self.contexts, self.optimizers, strict=True):
            worker, ctx, x, y = entry
            with acting_as(worker):
                await backward(ctx, [y.sum()])
                assert get_gradients(ctx)[x].tolist() == [1.0] * 3
                await optimizer.step(ctx)
        for worker, layer in zip(self.honest.all, self.values[::2], strict=True):
            with acting_as(worker):
                assert (await layer.rpc_async().value()).tolist() == [0.5] * 3
        await self.honest.work()


@asynccontextmanager
async def sending(kind: str, world: World, member: Worker) -> AsyncIterator[Send]:
    """Give how a peer of a kind sends a message to the receiver."""
    ps = world.receiver
    async with AsyncExitStack() as stack:
        if kind == "observer":
            observer = await stack.enter_async_context(Observer(INSIDE))
            observed = await observer.connect(ps.addresses[0])

            async def look(message: type[Message], content: Any) -> None:
                raw: Any = RawMessage(message.service, message.method, content)
                raw.read_answer = lambda _peer, value: value
                if issubclass(message, Request) and _is_plain(content):
                    await observed.ask(raw, timeout_s=ANSWER_S)

            yield look
            return
        worker = member
        if kind == "guest":
            worker = _guest(ps, "liar", Policy.TRUSTED)
        elif kind == "unjoined":
            where = {"ps": ps.addresses, "liar": "tcp://127.0.0.1:9"}
            worker = Worker("liar", rendezvous=where, options=INSIDE)
        if kind != "member":
            await worker.__aenter__()
        # What the receiver asks of a replica is answered.
        stack.push_async_callback(worker.shutdown, drain_timeout_s=0.0)

        async def send(message: type[Message], content: Any) -> None:
            link: Any = await worker.parts.link_to("ps")
            raw: Any = RawMessage(message.service, message.method, content)
            async with asyncio.timeout(ANSWER_S):
                if issubclass(message, Request):
                    await link.ask(raw)
                else:
                    link.tell(raw)
                ping: Any = RawMessage("membership", "ping", [])
                await link.ask(ping)

        yield send


@pytest.mark.parametrize("policy", Policy)
@pytest.mark.parametrize("kind", LIARS)
async def test_message_about_a_third_party_changes_nothing(
    kind: str, policy: Policy
) -> None:
    async with honest_ones(policy, kind) as (honest, member), AsyncExitStack() as stack:
        await stack.enter_async_context(serving.Replica(honest.ps))
        world = World(honest, "liar")
        await world.begin(stack)
        async with sending(kind, world, member) as send:
            before = world.kept()
            for key, about in ABOUT.items():
                for subject in world.subjects:
                    with suppress(AsyncRpcError, TimeoutError):
                        await send(MESSAGES[key], about(subject))
                    try:
                        await until(lambda: world.kept() == before)
                    except TimeoutError:
                        now = world.kept()
                        wrong = {k: (before[k], now[k]) for k in now}
                        wrong = {k: v for k, v in wrong.items() if v[0] != v[1]}
                        pytest.fail(f"{key} about {subject.name!r}: {wrong}")
        await until(honest.knows_each_other)
        await world.end()
