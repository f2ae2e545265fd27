"""Every collective gives what it should, in every way that it may take."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import torch

import asyncrpc
from asyncrpc import Group, LimitOptions, Options, UsageError, Worker
from asyncrpc.parallel.collectives.message_path import MessagePath
from asyncrpc.parallel.collectives.shared import SharedPath
from asyncrpc.testing import Cluster, ProcessCluster, acting_as
from tests.integration.parallel.collectives import scenarios

WAYS = ["shared memory", "messages between processes", "messages in one process"]
SCENARIOS = [
    "check_moves",
    "check_uneven",
    "check_bits",
    "check_layouts",
    "check_many",
    "check_points",
]


async def way_of(name: str) -> str:
    """Say which way a group of this worker takes."""
    group = Group(asyncrpc.current_worker(), name=name)
    async with group:
        await group.barrier()
        opening: Any = group._runs.opening  # noqa: SLF001
        return type(opening.result()).__name__


class Ranks:
    """The ranks of one test, wherever they are."""

    def __init__(self, workers: list[Worker], others: list[str]) -> None:
        self.workers = workers
        self.others = others

    async def all(
        self, function: Callable[..., Awaitable[Any]], *args: Any, **kwargs: Any
    ) -> list[Any]:
        """Let every rank run a coroutine function."""

        async def here(worker: Worker) -> Any:
            with acting_as(worker):
                return await function(*args, **kwargs)

        there: list[Awaitable[Any]] = [
            self.workers[0].peer(name).call(function, *args, **kwargs)
            for name in self.others
        ]
        return list(await asyncio.gather(*map(here, self.workers), *there))


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[2, 3])
async def ranks(way: str, request: pytest.FixtureRequest) -> AsyncIterator[Ranks]:
    size = int(request.param)
    if way == "messages in one process":
        async with Cluster(size) as workers:
            yield Ranks(workers, [])
        return
    plain = way == "messages between processes"
    options = Options(limits=LimitOptions(shared_memory_bytes=0)) if plain else None
    names = ["b", "c", "d"][: size - 1]
    async with ProcessCluster(names, options=options, method="forkserver") as worker:
        yield Ranks([worker], names)


async def test_group_uses_the_path_under_test(ranks: Ranks, way: str) -> None:
    wanted = SharedPath if way == "shared memory" else MessagePath
    assert set(await ranks.all(way_of, "which")) == {wanted.__name__}


async def test_ranks_of_one_host_without_unix_sockets_send_messages() -> None:
    async with ProcessCluster(["b"], transport="tcp", method="forkserver") as worker:
        ranks = Ranks([worker], ["b"])
        assert set(await ranks.all(way_of, "which")) == {MessagePath.__name__}


async def copied_from_now_on(*modules: str) -> None:
    """Let memory of groups arrive as a copy, as where a storage lost its key."""
    for name in modules:
        module: Any = importlib.import_module(f"asyncrpc.parallel.collectives.{name}")
        module.shared_bytes = lambda nbytes, _: torch.zeros(nbytes, dtype=torch.uint8)


async def reduced_in_group_memory() -> bool:
    async with Group(asyncrpc.current_worker(), name="copied") as group:
        memory = await group.empty(100_000)
        memory.fill_(group.rank + 1)
        await group.all_reduce(memory)
        return bool((memory == sum(range(group.size + 1))).all())


@pytest.mark.parametrize(
    ("modules", "way"), [(["path", "shared"], MessagePath), (["shared"], SharedPath)]
)
async def test_copied_memory_is_not_taken_for_shared(
    modules: list[str], way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in modules:
        module = importlib.import_module(f"asyncrpc.parallel.collectives.{name}")
        monkeypatch.setattr(module, "shared_bytes", module.shared_bytes)  # put back
    names = ["b", "c"]
    async with ProcessCluster(names, method="forkserver") as worker:
        ranks = Ranks([worker], names)
        await ranks.all(copied_from_now_on, *modules)
        assert set(await ranks.all(way_of, "which")) == {way.__name__}
        assert all(await ranks.all(reduced_in_group_memory))


async def test_expanded_tensors_are_refused_as_outputs() -> None:
    async with Cluster(2) as workers:
        first, second = (Group(worker) for worker in workers)
        expanded = torch.ones(1, 3).expand(4, 3)
        for refused in (
            first.all_reduce(expanded),
            first.reduce(expanded, 0),
            first.broadcast(expanded, 1),
            first.recv(1, out=expanded),
        ):
            with pytest.raises(UsageError, match=r"shape \(4, 3\) is expanded"):
                await refused
        # What is only read may be expanded.
        received = torch.zeros(4, 3)
        await asyncio.gather(
            first.broadcast(expanded, 0), second.broadcast(received, 0)
        )
        assert torch.equal(received, expanded)
        single = torch.ones(1).expand(1)  # a stride of 0 that no other element shares
        await asyncio.gather(first.all_reduce(single), second.all_reduce(torch.ones(1)))
        assert single.item() == 2


async def test_overflow_raises_no_warning() -> None:
    """Infinities are results like others: pytest makes errors of warnings."""
    async with Cluster(2) as workers:
        groups = [Group(worker) for worker in workers]
        most = torch.finfo(torch.float32).max
        results = await asyncio.gather(
            *(group.all_reduce(torch.full((5,), most)) for group in groups)
        )
        assert all(result.isinf().all() for result in results)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
async def test_collective_gives_the_expected_values(
    ranks: Ranks, scenario: str
) -> None:
    await ranks.all(scenarios.play, scenario)


@pytest.mark.slow
async def test_reductions_give_the_expected_sums(ranks: Ranks, way: str) -> None:
    in_order = way == "shared memory"
    await ranks.all(scenarios.play, "check_sums", in_rank_order=in_order)
