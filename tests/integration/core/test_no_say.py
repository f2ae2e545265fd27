"""Whoever has no part in something has no say in it, though it is in the group.

Each message here has the right form, and is refused for whom it comes from.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import AsyncRpcError, ElasticGroup, Group, RRef, Worker, join_group
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.collectives import rendezvous
from asyncrpc.core.autograd.contexts import current_context_var
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.links.link import Link
from asyncrpc.core.membership.messages import fields_of
from asyncrpc.core.parts import Parts
from asyncrpc.parallel.collectives.service import EARLY_BYTES, UNKNOWN_MAX, group_id
from asyncrpc.testing import Cluster, acting_as
from tests import raw_messages
from tests.integration.core.conftest import Trio
from tests.integration.core.rref_parts import Counter, all_freed

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
async def test_context_is_not_ended_by_a_non_owner(
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
                assert "which only the worker that opened it, or" in caplog.text
            await backward(ctx, [y.sum()])
            assert get_gradients(ctx)[x].tolist() == [2.0] * 3


def pass_on(x: torch.Tensor, to: str) -> Any:
    return asyncrpc.current_worker().peer(to).call(double, x)


async def test_context_is_ended_only_by_its_opener_or_bearer(
    a: Worker, b: Worker, c: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that joined the context, or took it from another, does not end it."""
    with acting_as(a):
        async with context() as ctx:
            x = torch.ones(3, requires_grad=True)
            link = await c.parts.link_to("b")
            y = await a.peer("b").call(double, x)
            with pytest.raises(AsyncRpcError, match="opened by another worker"):
                await raw_messages.request(link, "autograd", "join", list(ctx.id))
            await tell(link, "autograd", "release", list(ctx.id))
            assert "has no part in autograd context" in caplog.text
            z = await a.peer("b").call(pass_on, x, "c")
            await tell(link, "autograd", "release", list(ctx.id))
            assert "or brought it here, may end" in caplog.text
            await backward(ctx, [y.sum() + z.sum()])
            assert get_gradients(ctx)[x].tolist() == [4.0] * 3
    service: Any = b.parts.service("autograd")
    async with asyncio.timeout(LIMIT_S):
        while service.open_contexts:  # noqa: ASYNC110  (nothing tells)
            await asyncio.sleep(0.01)


async def test_context_its_creator_never_opened_is_not_opened(trio: Trio) -> None:
    """A context opened by a peer that is not its creator would never end."""
    a, _, c = trio
    service: Any = c.parts.service("autograd")
    with acting_as(c):
        for serial in range(5):
            made_up = service.context_of((a.incarnation, serial))
            service.open(made_up.id, WorkerId("a", a.incarnation))
            token = current_context_var.set(made_up)
            x = torch.ones(3, requires_grad=True)
            assert (await c.peer("a").call(double, x)).tolist() == [2.0] * 3
            current_context_var.reset(token)
    theirs: Any = a.parts.service("autograd")
    assert theirs.open_contexts == 0


async def test_context_ended_by_others_works_for_its_creator(trio: Trio) -> None:
    """Another worker brings the context to `b` first, and ends it there."""
    a, _, c = trio
    with acting_as(a):
        async with context() as ctx:
            await a.peer("c").call(double, torch.ones(3, requires_grad=True))
            with acting_as(c):
                await c.peer("b").call(len, "ab")
            link = await c.parts.link_to("b")
            service: Any = c.parts.service("autograd")
            token = current_context_var.set(service.context_of(ctx.id))
            await c.peer("b").call(double, torch.ones(3, requires_grad=True))
            current_context_var.reset(token)
            await tell(link, "autograd", "release", list(ctx.id))
            x = torch.ones(3, requires_grad=True)
            await backward(ctx, [(await a.peer("b").call(double, x)).sum()])
            assert get_gradients(ctx)[x].tolist() == [2.0] * 3


@pytest.mark.parametrize("method", ["commit", "abort"])
async def test_later_pass_is_not_ended_by_a_participant(
    a: Worker, b: Worker, c: Worker, method: str
) -> None:
    """A participant does not end the passes that others will begin."""
    with acting_as(a):
        async with context() as ctx:
            x = torch.ones(3, requires_grad=True)
            y = await a.peer("b").call(double, x)
            z = await a.peer("c").call(pass_on, x, "b")
            for to in "ab":
                link = await c.parts.link_to(to)
                for root in (a, b):
                    for number in range(20):
                        ids = [*ctx.id, int(root.incarnation), number]
                        raw_messages.tell(link, "autograd", method, ids)
                await tell(link, "autograd", method, ids)
            await backward(ctx, [y.sum() + z.sum()])
            assert get_gradients(ctx)[x].tolist() == [4.0] * 3


async def test_gradient_from_another_sender_is_dropped(trio: Trio) -> None:
    """Only `b` may send a gradient for a tensor that `a` sent to `b`."""
    a, b, c = trio
    with acting_as(a):
        async with context() as ctx:
            x = torch.ones(3, requires_grad=True)
            y = await a.peer("b").call(double, x)
            service: Any = a.parts.service("autograd")
            (message,) = service.state(ctx).sent
            ids = [*ctx.id, int(c.incarnation), 1]
            target = [message.serial, 0]
            fields = [*ids, "c", False, False, False, [], target, None, None, None]
            for name, position in (("c", 0), ("b", 1), ("b", 99)):
                link = await (b if name == "b" else c).parts.link_to("a")
                fields[9] = [message.serial, position]
                value = [[torch.ones(3)], {"fields": fields}]
                with pytest.raises(AsyncRpcError, match="was sent"):
                    await raw_messages.request(link, "autograd", "advance", value)
            assert not service.running_passes  # or whoever waits for it would hang
            await backward(ctx, [y.sum()])
            assert get_gradients(ctx)[x].tolist() == [2.0] * 3


async def test_group_ignores_messages_of_non_members(
    a: Worker, b: Worker, c: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    groups = [Group(member, members=["a", "b"], timeout_s=LIMIT_S) for member in (a, b)]
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
    await asyncio.gather(*(member.all_reduce(each) for member, each in pairs))
    assert tensors[0].tolist() == [2.0, 2.0]
    for group in groups:
        group.close()


def lies_about(number: int, rank: int) -> list[tuple[str, list[Any]]]:
    """Return all that may be said of a group."""
    failure = ["collective", "nothing has happened", ["b"]]
    return [
        ("begun", [number, 0, rank, ["barrier", "", "", None, -1]]),
        ("failed", [number, 0, failure]),
        ("left", [number, 0, failure]),
        ("lost", [number, failure]),
        ("woke", [number]),
    ]


async def reduce(workers: list[Worker]) -> None:
    """Make a group of workers, and reduce a tensor."""
    names = [worker.name for worker in workers]
    groups = [Group(worker, members=names, timeout_s=LIMIT_S) for worker in workers]
    tensors = [torch.ones(2) for _ in workers]
    pairs = zip(groups, tensors, strict=True)
    await asyncio.gather(*(own_group.all_reduce(each) for own_group, each in pairs))
    for each in tensors:
        assert each.tolist() == [float(len(workers))] * 2
    for group in groups:
        group.close()


@pytest.mark.parametrize("rank", [0, 1, 77])
async def test_early_messages_of_strangers_are_dropped(trio: Trio, rank: int) -> None:
    """The members are known once the group is made."""
    a, b, c = trio
    number = group_id("", ["a", "b"], 1)
    link = await c.parts.link_to("a")
    for method, words in lies_about(number, rank):
        await tell(link, "collectives", method, words)
    words = [number, 0, rank, 0, None, [torch.full((2,), 99.0)]]
    block = raw_messages.request(link, "collectives", "block", words)
    words = [number, rank, 0, torch.full((2,), 99.0)]
    point = raw_messages.request(link, "collectives", "point", words)
    await reduce([a, b])
    for answer in (block, point):
        with pytest.raises(AsyncRpcError, match=f"'c' is not rank {rank} of a gr"):
            await answer


async def test_member_counts_after_a_stranger_claimed_its_rank(trio: Trio) -> None:
    """The early messages of each sender are kept apart."""
    a, b, c = trio
    number = group_id("", ["a", "b"], 1)
    for worker in (c, b):
        link = await worker.parts.link_to("a")
        words = [number, 0, 1, ["barrier", "", "", None, -1]]
        await tell(link, "collectives", "begun", words)
    group = Group(b, members=["a", "b"], timeout_s=LIMIT_S)
    waiting = asyncio.ensure_future(group.broadcast(torch.ones(2), root=1))
    await a.peer("b").call(len, "ab")
    ours = Group(a, members=["a", "b"], timeout_s=LIMIT_S)
    with pytest.raises(AsyncRpcError, match=r"'b'. began barrier"):
        await ours.broadcast(torch.zeros(2), root=1)
    with pytest.raises(AsyncRpcError, match="do not agree"):
        await waiting
    for each in (group, ours):
        each.close()


async def test_stranger_does_not_exhaust_the_groups_of_others(trio: Trio) -> None:
    a, b, c = trio
    link = await c.parts.link_to("a")
    for number in range(2 * UNKNOWN_MAX):
        raw_messages.tell(link, "collectives", "woke", [number])
    await tell(link, "collectives", "woke", [1])
    service: Any = a.parts.service("collectives")
    assert len(service._groups) == UNKNOWN_MAX  # noqa: SLF001
    held_bytes = service.held_for(c.parts.id.incarnation)
    assert held_bytes > UNKNOWN_MAX * EARLY_BYTES
    await reduce([a, b])
    assert service.held_for(c.parts.id.incarnation) == held_bytes
    service.on_peer_lost(c.parts.id, "it is gone")
    assert service.held_for(c.parts.id.incarnation) == 0
    assert not service.groups


async def test_member_leaves_only_in_its_own_name(
    trio: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    a, _b, c = trio
    groups = [Group(worker, timeout_s=LIMIT_S) for worker in trio]
    service: Any = a.parts.service("collectives")
    (number,) = service._groups  # noqa: SLF001
    words = [number, 0, ["collective", "gone", ["b"]]]
    await tell(await c.parts.link_to("a"), "collectives", "left", words)
    assert "'c' left a group of 3 in the name of another" in caplog.text
    await asyncio.gather(*(group.barrier() for group in groups))
    for group in groups:
        group.close()


async def test_non_member_learns_nothing_of_a_group(a: Worker, c: Worker) -> None:
    group = Group(a, members=["a", "b"], timeout_s=LIMIT_S)
    service: Any = a.parts.service("collectives")
    (number,) = service._groups  # noqa: SLF001
    link = await c.parts.link_to("a")
    with pytest.raises(AsyncRpcError, match="'c' is not a member of"):
        await raw_messages.request(link, "collectives", "begun", [number])
    group.close()


async def joined(workers: Sequence[Worker]) -> list[ElasticGroup]:
    return await asyncio.gather(
        *(
            join_group(worker, "g", min_size=len(workers), timeout_s=LIMIT_S)
            for worker in workers
        )
    )


async def test_elastic_group_ignores_a_stranger(trio: Trio) -> None:
    """A stranger neither leaves it for a member, nor tells of a view after it."""
    a, b, c = trio
    groups = await joined([a, b])
    ids = [[worker.name, int(worker.incarnation)] for worker in trio]
    link = await c.parts.link_to("a")
    for generation, members, departures in (
        (1, ids[:2], [[ids[1], 9]]),
        (2, [ids[1], ids[2]], []),
        (2, [ids[0], ids[2]], []),
        (1 << 60, [ids[2]], []),
    ):
        words = [generation, members, [0 for _ in members], True, [], [], departures]
        await tell(link, "collectives", "standing", ["g", *words])
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(group.reconfigure() for group in groups))
    for group in groups:
        assert (group.generation, group.current.members) == (2, ("a", "b"))
        group.close()


async def test_generations_far_ahead_are_refused(
    trio: Trio, caplog: pytest.LogCaptureFixture
) -> None:
    groups = await joined(trio)
    ids = [[worker.name, int(worker.incarnation)] for worker in trio]
    link = await trio[2].parts.link_to("a")
    far = [["g", (1 << 63) - 1, ids, [0] * 3, True, [], [], []]]
    far.append(["g", 1, ids, [0] * 3, True, [], [], [[ids[0], (1 << 63) - 1]]])
    for lie in far:
        await tell(link, "collectives", "standing", lie)
    assert caplog.text.count("more than 4294967296 ahead") == len(far)
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(group.reconfigure() for group in groups))
    assert [group.generation for group in groups] == [2] * 3
    for group in groups:
        group.close()


async def test_false_news_of_a_death_is_refuted(trio: Trio) -> None:
    """The worker that is named stays connected to the others."""
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


async def test_invalid_record_keeps_the_others_valid(
    a: Worker, c: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    link = await c.parts.link_to("a")
    service: Any = a.parts.service("membership")
    good = ["newcomer", -1, 77, ["mem://nowhere"], "", 1, 0, 2]
    wrong = [[-1, [*good[:5], 2**70, 0, 0]], [-1, None], 5, [-5, good]]
    await tell(link, "membership", "news", [[*wrong, [-1, good], *wrong]])
    assert "could not be taken: membership.news" in caplog.text
    assert service.table.get("newcomer") is not None


async def test_barrier_ignores_arrivals_of_no_rank() -> None:
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
        await asyncio.wait_for(asyncio.gather(a.barrier(), b.barrier()), LIMIT_S)


FAR = (1 << 63) - 1  # the last number that travels


@pytest.mark.parametrize(
    ("method", "value"),
    [
        ("arrivals", [FAR, -1, True, FAR, b"\x02"]),
        ("arrivals", [-1, FAR, False, -1, b""]),
        ("arrivals", [0, -1, True, FAR, b"\x02"]),
        ("report", [FAR, -1, False]),
        ("report", [0, FAR, False]),
        ("failed", [FAR, -1, ["GAVE_UP", "", [], None]]),
        ("failed", [0, FAR, ["GAVE_UP", "", [], None]]),
        ("failed", [0, -1, ["GAVE_UP", "", [], [[1, 0], FAR]]]),
        ("elsewhere", [FAR, 1, [[1, 0], 0]]),
        ("elsewhere", [0, 1, [[1, 0], FAR]]),
    ],
)
async def test_rounds_far_ahead_are_refused(
    method: str, value: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    async with Cluster(2) as (a, b):
        link = await b.parts.link_to("a")
        await asyncio.gather(*(rendezvous(worker, "t", b"") for worker in (a, b)))
        await tell(link, "rounds", method, ["RENDEZVOUS", "t", None, *value])
        assert "is more than 4294967296 rounds ahead" in caplog.text
        async with asyncio.timeout(LIMIT_S):
            payloads = await asyncio.gather(
                *(rendezvous(worker, "t", b"x") for worker in (a, b))
            )
        assert payloads == [[b"x", b"x"]] * 2
        service: Any = a.parts.service("rounds")
        newest = [value.newest for value in service.table._all.values()]  # noqa: SLF001
        assert max(newest) == 1


# --- references ----------------------------------------------------------------------

_kept: list[Any] = []


def keep(value: Any) -> None:
    _kept.append(value)


@contextmanager
def forging(liar: Worker, tree: list[Any]) -> Iterator[RRef[Any]]:
    """Give a reference of the liar that travels as this tree."""
    references: Any = liar.parts.references
    lower = references.lower
    with acting_as(liar):
        own = RRef(None)
    references.lower = lambda _: tree
    try:
        yield own
    finally:
        references.lower = lower


@pytest.mark.parametrize("form", ["fork", "loan"])
@pytest.mark.parametrize("victim", ["a", "b"])
async def test_forged_owner_of_a_reference_is_refused(
    trio: Trio, form: str, victim: str
) -> None:
    """Neither the count of the reference nor its use changes."""
    a, b, c = trio
    rref: Any = await a.peer("b").call(counter_of, 7)
    service: Any = b.parts.references
    code, token = (0, 0) if form == "fork" else (1, 99)
    tree = [*rref.rref_id, int(c.incarnation), "c", code, token]
    before = service.holders(rref.rref_id)
    with forging(c, tree) as forged, pytest.raises(AsyncRpcError, match="it is of wo"):
        await c.peer(victim).call(keep, forged)
    del forged
    gc.collect()
    assert service.holders(rref.rref_id) == before
    assert await rref.rpc_async().add(1) == 8
    del rref
    await all_freed(*trio)


def counter_of(count: int) -> RRef[Counter]:
    return RRef(Counter(count))


@pytest.mark.parametrize("creator", ["a", "b"])
async def test_reference_id_of_a_later_value_cannot_be_reserved(
    trio: Trio, creator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger mentions the id before the value is made."""
    a, b, c = trio
    maker: Any = a if creator == "a" else b
    number = (1).to_bytes(8)
    tree = [int(maker.incarnation), 1, int(b.incarnation), "b", 1, 0]
    with forging(c, tree) as forged:
        await c.peer("b").call(keep, forged)
    del forged
    monkeypatch.setattr(maker.parts, "random_bytes", lambda _: number)
    with acting_as(maker):
        rref = RRef(Counter(7)) if maker is b else a.peer("b").remote(Counter, 7)
        assert rref.rref_id.serial == 1
        assert (await rref.to_here()).count == 7
    del rref
    _kept.clear()
    await all_freed(*trio)


async def test_reference_ids_are_unpredictable(a: Worker) -> None:
    with acting_as(a):
        serials = [RRef(None).rref_id.serial for _ in range(100)]
    assert len(set(serials)) == len(serials)
    assert sum(serial.bit_count() for serial in serials) in range(2800, 3600)
    assert serials != sorted(serials)
