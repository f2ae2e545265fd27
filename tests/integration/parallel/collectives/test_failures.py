"""A collective that fails does so everywhere, with the name of whose fault it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import pytest
import torch

import asyncrpc
from asyncrpc import Group, LimitOptions, Options, UsageError
from asyncrpc.errors import (
    CollectiveError,
    CollectiveTimeoutError,
    GroupChangedError,
    RankLostError,
)
from asyncrpc.parallel.collectives.machine.operations import CollectiveFailure
from asyncrpc.parallel.collectives.messages import GroupLeft
from asyncrpc.testing import Cluster, ProcessCluster, acting_as, all_end

Begin = Callable[[Group], Awaitable[Any]]
OPTIONS = Options(drain_timeout_s=0.5)
LIMIT_S = 30.0  # which only a hang takes


@pytest.fixture
async def groups() -> AsyncIterator[list[Group]]:
    async with Cluster(3, options=OPTIONS) as workers:
        yield [Group(worker, timeout_s=60.0) for worker in workers]


async def outcomes(*coroutines: Awaitable[Any]) -> list[Any]:
    return list(await asyncio.gather(*coroutines, return_exceptions=True))


async def works(groups: list[Group]) -> None:
    """The next collective can be used."""
    got = await asyncio.gather(*(group.all_reduce(torch.ones(4)) for group in groups))
    assert all((total == len(groups)).all() for total in got)


def say_left(group: Group, *, ahead: int) -> None:
    """Tell the others that this rank has gone, and was some collectives ahead."""
    matching = group._matching  # noqa: SLF001
    failure = CollectiveFailure(GroupChangedError.code, "rank 1 ('b') has gone", ("b",))
    matching.tell(
        GroupLeft(matching.id, matching.machine.operations.begun + ahead, failure)
    )


async def heard_from(sender: Group, receiver: Group) -> None:
    """Return when what a rank has sent to another before this has come."""
    await sender.worker.peer(receiver.worker.name).call(len, "ab")


_stays: list[asyncio.Event] = []


async def stay() -> None:
    """Run until the test lets it end."""
    _stays.append(asyncio.Event())
    await _stays[-1].wait()


class TestMismatch:
    @pytest.mark.parametrize(
        ("odd", "says"),
        [
            (lambda g: g.all_reduce(torch.ones(5)), "(5,)"),
            (lambda g: g.all_reduce(torch.ones(4).double()), "float64"),
            (lambda g: g.all_reduce(torch.ones(4), "max"), "'max'"),
            (lambda g: g.broadcast(torch.ones(4), 2), "broadcast"),
            (lambda g: g.barrier(), "barrier"),
            (lambda g: g.gather(torch.ones(4), 2), "gather"),
        ],
    )
    @pytest.mark.parametrize("rank", [0, 1, 2])
    async def test_mismatch_is_named_to_every_rank(
        self,
        groups: list[Group],
        odd: Callable[[Group], Awaitable[Any]],
        says: str,
        rank: int,
    ) -> None:
        await works(groups)
        errors = await outcomes(
            *(
                odd(group) if group.rank == rank else group.all_reduce(torch.ones(4))
                for group in groups
            )
        )
        for error in errors:
            assert type(error) is CollectiveError
            assert f"rank {rank} (" in str(error)
            assert says in str(error)
            assert groups[rank].members[rank] in error.ranks
        await works(groups)

    async def test_crossed_roots_of_gather_fail(self, groups: list[Group]) -> None:
        """Each rank is the root of its own gather, so that no rank sends."""
        errors = await outcomes(
            *(group.gather(torch.ones(4), group.rank) for group in groups)
        )
        assert all(type(error) is CollectiveError for error in errors)
        await works(groups)


class TestLateness:
    async def test_timeout_names_the_missing_rank(self) -> None:
        async with Cluster(3, options=OPTIONS) as workers:
            groups = [Group(worker, timeout_s=3.0) for worker in workers]
            await works(groups)
            errors = await outcomes(*(group.barrier() for group in groups[:2]))
            for error in errors:
                assert type(error) is CollectiveTimeoutError
                assert isinstance(error, TimeoutError)
                assert error.ranks == ("c",)
                assert "rank 2 ('c')" in str(error)
                assert "3 s" in str(error)
            with pytest.raises(CollectiveTimeoutError, match="have not begun it"):
                await groups[2].barrier()
            await works(groups)

    async def test_cancelled_collective_fails_on_every_rank(
        self, groups: list[Group]
    ) -> None:
        await works(groups)
        waiting = [asyncio.ensure_future(group.barrier()) for group in groups[:2]]
        await asyncio.sleep(0)  # they begin
        waiting[1].cancel()
        errors = await outcomes(*waiting, groups[2].barrier())
        assert isinstance(errors[1], asyncio.CancelledError)
        for error in (errors[0], errors[2]):
            assert type(error) is CollectiveError
            assert "rank 1 ('b') cancelled it" in str(error)
        await works(groups)


class TestLeaving:
    async def test_closed_group_ends_collectives_of_all_ranks(
        self, groups: list[Group]
    ) -> None:
        await works(groups)
        waiting = [asyncio.ensure_future(group.barrier()) for group in groups[:2]]
        await asyncio.sleep(0)  # they begin
        groups[2].close()
        for error in await outcomes(*waiting):
            assert type(error) is GroupChangedError
            assert error.ranks == ("c",)
        for group in groups:
            with pytest.raises(GroupChangedError, match="rank 2"):
                await group.barrier()

    async def test_rank_may_leave_after_its_last_collective(
        self, groups: list[Group]
    ) -> None:
        async def last(group: Group) -> None:
            await group.barrier()
            group.close()

        for _ in range(3):
            assert await outcomes(*map(last, groups)) == [None] * 3
            groups = [Group(former.worker) for former in groups]
        await works(groups)

    @pytest.mark.parametrize("how", ["closes the group", "shuts down"])
    async def test_departure_fails_an_earlier_collective_still_open(
        self, groups: list[Group], how: str
    ) -> None:
        await works(groups)
        say_left(groups[1], ahead=2)
        waiting = asyncio.ensure_future(groups[0].barrier())
        await heard_from(groups[1], groups[0])
        if how == "shuts down":
            await groups[2].worker.shutdown()
        else:
            groups[2].close()
        (error,) = await outcomes(waiting)
        assert isinstance(error, CollectiveError)
        assert error.ranks == ("c",)

    async def test_leaving_rank_answers_early_requests(
        self, groups: list[Group]
    ) -> None:
        say_left(groups[1], ahead=5)
        await heard_from(groups[1], groups[0])
        sending = asyncio.ensure_future(groups[2].all_reduce(torch.ones(3)))
        operations = groups[0]._matching.machine.operations  # noqa: SLF001
        while not operations.numbers():
            await heard_from(groups[2], groups[0])
        groups[0].close()
        assert not operations.numbers()
        (error,) = await outcomes(sending)
        assert type(error) is GroupChangedError

    async def test_shutdown_fails_collectives_of_all_ranks(self) -> None:
        async with all_end(LIMIT_S), Cluster(2) as (a, b):
            staying = asyncio.ensure_future(a.peer("b").call(stay))
            await a.peer("b").call(len, "ab")  # so the other has arrived
            groups = [Group(worker) for worker in (a, b)]
            closing = asyncio.ensure_future(b.shutdown(drain_timeout_s=60.0))
            await asyncio.sleep(0)
            await b.peer("a").call(len, "ab")  # it comes after the goodbye
            errors = await outcomes(groups[0].send(torch.ones(1), 1))
            errors += await outcomes(*(group.barrier() for group in groups))
            _stays.pop().set()
            await staying
            await closing
        # These errors are kept meanwhile, and keep nothing that would wait.
        for error in errors:
            assert isinstance(error, CollectiveError)
            assert "shutting down" in str(error)

    async def test_group_name_is_open_once(self, groups: list[Group]) -> None:
        worker = groups[0].worker
        with pytest.raises(UsageError, match="open on worker"):
            Group(worker)
        Group(worker, name="another").close()


kept: dict[str, Group] = {}  # of a process, between two calls


async def meet() -> None:
    group = kept["group"] = Group(asyncrpc.current_worker(), timeout_s=60.0)
    await group.all_reduce(torch.ones(3))


def begun() -> int:
    return kept["group"]._matching.machine.operations.begun  # noqa: SLF001


async def go_on(size: int) -> str:
    """Wait for one that never comes; say how it ends."""
    group = kept["group"]
    with pytest.raises(RankLostError) as caught:
        await group.all_reduce(torch.ones(size))
    with pytest.raises(RankLostError):
        await group.barrier()
    kept.clear()
    return str(caught.value)


@pytest.mark.parametrize("size", [10, 3_000_000])
@pytest.mark.parametrize("memory", ["shared", "not shared"])
async def test_killed_rank_fails_the_collective_on_all_ranks(
    size: int, memory: str
) -> None:
    plain = Options(drain_timeout_s=0.5, limits=LimitOptions(shared_memory_bytes=0))
    options = OPTIONS if memory == "shared" else plain
    cluster = ProcessCluster(["b", "c"], options=options, method="forkserver")
    async with cluster as worker:
        cluster.expect_death("c")
        with acting_as(worker):
            b, c = worker.peer("b"), worker.peer("c")
            await asyncio.gather(meet(), b.call(meet), c.call(meet))
            before = begun()
            both = asyncio.gather(b.call(go_on, size), go_on(size))
            while begun() == before or await b.call(begun) == before:  # noqa: ASYNC110  the other is a process
                await asyncio.sleep(0)
            cluster.kill("c")
            for text in await both:
                assert "rank 2 ('c')" in text
                assert "is lost" in text


class TestUsage:
    async def test_local_mistake_is_raised_locally(self, groups: list[Group]) -> None:
        group = groups[0]
        cases: list[tuple[Callable[[], Awaitable[Any]], str]] = [
            (
                lambda: group.all_reduce(torch.ones(2), "mean"),
                "op must be one of .* not 'mean'",
            ),
            (lambda: group.all_reduce(torch.ones(2), "band"), "not defined for"),
            (lambda: group.all_reduce(torch.ones(2).long(), "avg"), "use 'sum'"),
            (lambda: group.all_reduce(torch.ones(2).to_sparse()), "sparse_coo"),
            (lambda: group.all_reduce(torch.ones(2, device="meta")), "'meta'"),
            (lambda: group.all_reduce(cast("Any", [1, 2])), "of type list"),
            (
                lambda: group.broadcast(torch.ones(2), 3),
                "root must be a rank from 0 to 2",
            ),
            (lambda: group.scatter([torch.ones(2)], 0), "each of the 3 ranks"),
            (lambda: group.scatter([torch.ones(2)] * 3, 1), "tensors must be None"),
            (lambda: group.all_to_all(torch.ones(4)), "not divisible by the 3"),
            (lambda: group.reduce_scatter([torch.ones(1)] * 2), "got 2"),
        ]
        for call, says in cases:
            with pytest.raises(UsageError, match=says):
                await call()
        await works(groups)

    async def test_invalid_members_are_refused(self, groups: list[Group]) -> None:
        worker = groups[0].worker
        with pytest.raises(UsageError, match="distinct; repeated: 'b'"):
            Group(worker, ["a", "b", "b"])
        with pytest.raises(UsageError, match="not among the members"):
            Group(worker, ["b", "c"])
        with pytest.raises(asyncrpc.errors.UnknownWorkerError):
            Group(worker, ["a", "x"])


async def test_subgroups_work_beside_each_other(groups: list[Group]) -> None:
    pairs = [groups[0].subgroup([0, 2]), groups[2].subgroup([0, 2])]
    alone = groups[1].subgroup([1])
    whole = asyncio.gather(*(group.all_reduce(torch.ones(2)) for group in groups))
    sums = await asyncio.gather(
        *(group.all_reduce(torch.full((2,), 5.0)) for group in (*pairs, alone))
    )
    assert [total[0].item() for total in sums] == [10.0, 10.0, 5.0]
    assert all((total == 3).all() for total in await whole)
    with pytest.raises(UsageError, match="ranks must include rank 1"):
        groups[1].subgroup([0, 2])


async def test_first_collective_times_out_as_later_ones() -> None:
    """The first one waits for the choice of the path, which has no limit of its own."""
    async with Cluster(2, options=OPTIONS) as workers:
        groups = [Group(worker, timeout_s=0.2) for worker in workers]
        for number in (1, 2):
            with pytest.raises(CollectiveTimeoutError, match=f"{number} .*: rank 1"):
                async with asyncio.timeout(60.0):
                    await groups[0].all_reduce(torch.ones(4))
        # Who comes at last is told, and can go on with the others.
        errors = await outcomes(*(groups[1].all_reduce(torch.ones(4)) for _ in "ab"))
        assert [type(error) for error in errors] == [CollectiveTimeoutError] * 2
        await works(groups)


async def test_the_first_collective_ends_with_its_worker() -> None:
    async with Cluster(2, options=OPTIONS) as workers:
        groups = [Group(worker) for worker in workers]
        waiting = asyncio.create_task(groups[0].all_reduce(torch.ones(4)))
        await asyncio.sleep(0)
        await workers[0].shutdown(drain_timeout_s=0.0)
        with pytest.raises(GroupChangedError):
            await waiting


class TestPoints:
    async def test_unmatched_send_and_recv_time_out(self) -> None:
        async with Cluster(2, options=OPTIONS) as workers:
            groups = [Group(worker, timeout_s=0.2) for worker in workers]
            with pytest.raises(CollectiveTimeoutError, match="recv from rank 1"):
                await groups[0].recv(1)
            with pytest.raises(CollectiveTimeoutError, match="send to rank 1"):
                await groups[0].send(torch.ones(3), 1)
            # What was given up is not there any more.
            with pytest.raises(CollectiveTimeoutError):
                await groups[1].recv(0)

    async def test_out_of_another_shape_is_refused(self, groups: list[Group]) -> None:
        errors = await outcomes(
            groups[0].send(torch.ones(3), 1), groups[1].recv(0, out=torch.ones(4))
        )
        assert errors[0] is None
        assert "shape (3,), but `out` is" in str(errors[1])
