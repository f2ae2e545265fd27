"""A worker that was restarted under its name is a member like any other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest
import torch

from asyncrpc import Group, NetworkOptions, Options, Worker
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.errors import RankLostError
from asyncrpc.parallel.collectives.messages import SERVICE
from tests.ports import free_port

LIMIT_S = 60.0  # that only a hang reaches
NAMES = ("a", "b")


def worker(name: str, where: Mapping[str, str]) -> Worker:
    options = Options(
        secret="known to all of a test",
        network=NetworkOptions(listen=(where[name],)),
        drain_timeout_s=2.0,
    )
    return Worker(name, rendezvous=where, options=options)


async def reduce_at(member: Worker, name: str) -> float:
    async with Group(member, NAMES, name=name) as group:
        return float((await group.all_reduce(torch.ones(1)))[0])


async def reduce_in(workers: tuple[Worker, Worker], name: str) -> list[float]:
    async with asyncio.timeout(LIMIT_S):
        return await asyncio.gather(*(reduce_at(member, name) for member in workers))


@pytest.fixture
def where() -> dict[str, str]:
    return {name: f"tcp://127.0.0.1:{free_port()}" for name in NAMES}


async def test_restarted_worker_joins_a_new_group(where: dict[str, str]) -> None:
    async with worker("a", where) as a:
        async with worker("b", where) as first:
            assert await reduce_in((a, first), "first") == [2.0, 2.0]
            async with Group(a, NAMES, name="of the first") as group:
                await first.shutdown()
                with pytest.raises(RankLostError):
                    await group.all_reduce(torch.ones(1))
        async with worker("b", where) as second:
            assert await second.peer("a").call(len, "ab") == 2
            assert await reduce_in((a, second), "second") == [2.0, 2.0]


async def test_late_loss_of_a_former_incarnation_changes_nothing(
    where: dict[str, str],
) -> None:
    async with worker("a", where) as a, worker("b", where) as b:
        assert await a.peer("b").call(len, "ab") == 2
        groups = [Group(member, NAMES, name="open") for member in (a, b)]
        former = WorkerId("b", Incarnation(1))
        a.parts.service(SERVICE).on_peer_lost(former, "it has been restarted")
        async with asyncio.timeout(LIMIT_S):
            sums = await asyncio.gather(
                *(group.all_reduce(torch.ones(1)) for group in groups)
            )
        assert [float(total[0]) for total in sums] == [2.0, 2.0]
        assert await reduce_in((a, b), "another") == [2.0, 2.0]
        for group in groups:
            group.close()
