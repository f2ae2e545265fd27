"""Whoever has no part in something has no say in it, though it is in the group.

Each message here has the right form, and is refused for whom it comes from.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from asyncrpc import AsyncRpcError, Group
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.collectives.service import group_id
from asyncrpc.runtime.links.link import Link
from asyncrpc.runtime.membership.messages import fields_of
from asyncrpc.runtime.parts import Parts
from asyncrpc.testing import Cluster, acting_as
from tests import raw_messages
from tests.integration.runtime.conftest import Trio

LIMIT_S = 60.0  # for what would otherwise hang


def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


async def tell(link: Link, service: str, method: str, value: Any) -> None:
    """Send a notice, and wait until it has been taken or dropped."""
    raw_messages.tell(link, service, method, value)
    assert isinstance(link.host, Parts)
    assert await link.host.peer(link.peer.name).call(len, "ab") == 2


@pytest.mark.parametrize("method", ["release", "commit", "abort"])
@pytest.mark.parametrize("of", ["a", "b"])
async def test_a_context_of_others(
    trio: Trio, method: str, of: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A stranger, and a worker that takes part, cannot end what they did not begin."""
    a, b, c = trio
    with acting_as(a):
        async with context() as ctx:
            x = torch.ones(3, requires_grad=True)
            y = await a.peer("b").call(double, x)
            value = list(ctx.id)
            if method != "release":
                value += [int(a.incarnation), 10**6]
            await tell(await c.parts.link_to(of), "autograd", method, value)
            assert "has no part in autograd context" in caplog.text
            if method == "release" and of == "a":
                await tell(await b.parts.link_to("a"), "autograd", method, value)
                assert "which only the worker that opened it may end" in caplog.text
            await backward(ctx, [y.sum()])
            assert get_gradients(ctx)[x].tolist() == [2.0] * 3


async def test_a_gradient_that_was_not_asked_of_its_sender(trio: Trio) -> None:
    """What a has sent to b, only b gives a gradient for."""
    a, b, c = trio
    with acting_as(a):
        async with context() as ctx:
            x = torch.ones(3, requires_grad=True)
            y = await a.peer("b").call(double, x)
            service: Any = a.parts.service("autograd")
            (message,) = service.state(ctx).sent
            ids = [*ctx.id, int(c.incarnation), 1]
            given = [message.serial, 0]
            fields = [*ids, "c", False, False, False, [], given, None, None, None]
            for name, position in (("c", 0), ("b", 1), ("b", 99)):
                link = await (b if name == "b" else c).parts.link_to("a")
                fields[9] = [message.serial, position]
                value = [[torch.ones(3)], {"fields": fields}]
                with pytest.raises(AsyncRpcError, match="was sent"):
                    await raw_messages.request(link, "autograd", "advance", value)
            assert not service.running_passes  # or whoever waits for it would hang
            await backward(ctx, [y.sum()])
            assert get_gradients(ctx)[x].tolist() == [2.0] * 3


async def test_a_group_of_others(trio: Trio, caplog: pytest.LogCaptureFixture) -> None:
    a, b, c = trio
    groups = [Group(one, members=["a", "b"], timeout_s=LIMIT_S) for one in (a, b)]
    service: Any = a.parts.service("collectives")
    (number,) = service._groups  # noqa: SLF001
    link = await c.parts.link_to("a")
    failure = ["collective", "nothing has happened", []]
    for method, words in (
        ("failed", [0, failure]),
        ("left", [0, failure]),
        ("lost", [failure]),
        ("begun", [0, 1, ["barrier", "", "", None, -1]]),
    ):
        caplog.clear()
        await tell(link, "collectives", method, [number, *words])
        assert "worker 'c' is not" in caplog.text
    value = [number, 0, 1, 0, None, [torch.ones(1)]]
    with pytest.raises(AsyncRpcError, match="is not rank 1"):
        await raw_messages.request(link, "collectives", "block", value)
    tensors = [torch.ones(2), torch.ones(2)]
    pairs = zip(groups, tensors, strict=True)
    await asyncio.gather(*(one.all_reduce(each) for one, each in pairs))
    assert tensors[0].tolist() == [2.0, 2.0]
    for group in groups:
        group.close()


async def test_what_strangers_said_of_a_group_before_it_was_made(trio: Trio) -> None:
    """It is dropped when the group is made; before, who they are was not known."""
    a, b, c = trio
    number = group_id("", ["a", "b"], 1)
    link = await c.parts.link_to("a")
    for rank in (1, 77):
        words = [number, 0, rank, ["barrier", "", "", None, -1]]
        await tell(link, "collectives", "begun", words)
    groups = [Group(one, members=["a", "b"], timeout_s=LIMIT_S) for one in (a, b)]
    tensors = [torch.ones(2), torch.ones(2)]
    pairs = zip(groups, tensors, strict=True)
    await asyncio.gather(*(one.all_reduce(each) for one, each in pairs))
    assert tensors[1].tolist() == [2.0, 2.0]
    for group in groups:
        group.close()


async def test_news_of_a_death_are_refuted_by_the_dead(trio: Trio) -> None:
    """Whoever says so: the one who is named lives, and the others go on with it."""
    a, b, c = trio
    link = await c.parts.link_to("a")
    service: Any = a.parts.service("membership")
    for status in (1, 2):
        record = fields_of(service.table.get("a"))
        record[7] = status
        await tell(link, "membership", "news", [[[-1, record]]])
        assert service.table.me.is_alive
    assert await c.peer("a").call(len, "ab") == 2
    assert await b.peer("a").call(len, "ab") == 2


async def test_one_wrong_record_spoils_no_other(
    trio: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    a, _, c = trio
    link = await c.parts.link_to("a")
    service: Any = a.parts.service("membership")
    good = ["newcomer", -1, 77, ["mem://nowhere"], "", 1, 0, 2]
    wrong = [[-1, [*good[:5], 2**70, 0, 0]], [-1, None], 5, [-5, good]]
    await tell(link, "membership", "news", [[*wrong, [-1, good], *wrong]])
    assert "could not be taken: membership.news" in caplog.text
    assert service.table.get("newcomer") is not None


async def test_a_barrier_of_ranks_only() -> None:
    async with Cluster(2) as (a, b):
        link = await b.parts.link_to("a")
        for value in (
            [10**20, -1, True, 0, b""],
            [-2, -1, True, 0, b""],
            [0, 0, True, 0, b"\xff"],
            [1, 0, True, 0, b"\x01"],
            [0, 0, True, 0, "123"],
        ):
            await tell(link, "rounds", "arrivals", ["BARRIER", "", None, *value])
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(a.barrier(), b.barrier())
