"""The functions of torch.distributed, each beside gloo's."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp
from torch.distributed.distributed_c10d import _coalescing_manager

from asyncrpc.multiprocessing import launch
from tests.integration.parallel.collectives.torch_backend.playing import (
    Scenario,
    drawn,
    play,
    same,
    world,
)

Group = dist.ProcessGroup | None
OPERATIONS = (
    ReduceOp.SUM,
    ReduceOp.PRODUCT,
    ReduceOp.MIN,
    ReduceOp.MAX,
    ReduceOp.BAND,
    ReduceOp.BOR,
    ReduceOp.BXOR,
)
BITS = OPERATIONS[4:]
DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
)
MOVED = (*DTYPES, torch.int16, torch.bool, torch.complex64, torch.float8_e4m3fn)
SHAPES = ((), (0,), (5,), (3, 4), (50_000,))


def both(gloo: dist.ProcessGroup, run: Callable[[Group], Any]) -> None:
    """Run something over asyncrpc and over gloo; all that comes of it is the same."""
    same(run(None), run(gloo))


def check_all_reduce(gloo: dist.ProcessGroup) -> None:
    for dtype in DTYPES:
        for op in OPERATIONS:
            if dtype.is_floating_point and op in BITS:
                continue
            for shape in SHAPES:

                def run(group: Group) -> torch.Tensor:
                    mine = drawn(*shape).to(dtype)  # noqa: B023  (called at once)
                    dist.all_reduce(mine, op, group=group)  # noqa: B023
                    return mine

                both(gloo, run)
    complex_ = torch.complex(drawn(9), drawn(9))
    dist.all_reduce(complex_)
    size = dist.get_world_size()
    parts = [drawn(9, seed=rank) for rank in range(size)]
    same(
        complex_, torch.complex(sum(parts, torch.zeros(9)), sum(parts, torch.zeros(9)))
    )


def check_average(_gloo: dist.ProcessGroup) -> None:
    """Gloo has none."""
    size = dist.get_world_size()
    mine = torch.full((7,), float(dist.get_rank()))
    dist.all_reduce(mine, ReduceOp.AVG)
    same(mine, torch.full((7,), (size - 1) / 2))
    part = torch.zeros(2)
    dist.reduce_scatter_tensor(part, torch.ones(2 * size) * size, ReduceOp.AVG)
    same(part, torch.full((2,), float(size)))


def check_layouts(_gloo: dist.ProcessGroup) -> None:
    """What is no plain tensor: strided, a leaf, a view between others."""
    size = dist.get_world_size()
    whole = torch.arange(24.0).view(4, 6)
    before = whole.clone()
    dist.all_reduce(whole.t()[::2])
    before.t()[::2] *= size
    same(whole, before)
    leaf = torch.ones(3, requires_grad=True)
    dist.broadcast(leaf, 0)
    dist.all_reduce(leaf)
    same(leaf, torch.full((3,), float(size)))
    outs = [torch.zeros(3, requires_grad=True) for _ in range(size)]
    dist.all_gather(outs, leaf)
    same(outs, [leaf] * size)


def check_resizing(_gloo: dist.ProcessGroup) -> None:
    """What a collective has seen can still be resized, as FSDP and PowerSGD do."""
    size = dist.get_world_size()
    in_place: list[Callable[[torch.Tensor], Any]] = [
        dist.all_reduce,
        lambda tensor: dist.broadcast(tensor, 0),
        lambda tensor: dist.reduce(tensor, 0),
    ]
    for numel in (10, 50_000):
        for function in in_place:
            tensor = torch.ones(numel)
            function(tensor)
            tensor.untyped_storage().resize_(0)
        whole, part = torch.ones(size * numel), torch.ones(numel)
        dist.reduce_scatter_tensor(part, whole)
        dist.all_gather_into_tensor(whole, part)
        whole.resize_(3 * whole.numel())
        part.resize_(3 * numel)


def check_sparse(gloo: dist.ProcessGroup) -> None:
    def run(group: Group) -> list[torch.Tensor]:
        rank = dist.get_rank()
        indices = torch.tensor([[rank, 5, 5], [0, rank, rank]])
        values = torch.tensor([1.0, 2.0, 3.0])
        mine = torch.sparse_coo_tensor(indices, values, (7, 4), check_invariants=True)
        dist.all_reduce(mine, group=group)
        return [mine.to_dense()]

    both(gloo, run)


def check_roots(gloo: dist.ProcessGroup) -> None:
    """Functions of which one rank is special; gloo lacks some dtypes."""
    for root in range(dist.get_world_size()):
        for dtype in MOVED:
            received = move(None, root, dtype)
            same(received, moved(root, dtype))
            if dtype in DTYPES:
                same(received, move(gloo, root, dtype))
        reduced = reduce_to(None, root)
        if dist.get_rank() == root:
            same(reduced, reduce_to(gloo, root))
        else:
            same(reduced, drawn(40_000))  # gloo spoils it
            reduce_to(gloo, root)


def move(group: Group, root: int, dtype: torch.dtype) -> list[torch.Tensor]:
    size, is_root = dist.get_world_size(), dist.get_rank() == root
    got, mine = drawn(3, 2).to(dtype), drawn(3, 2).to(dtype)
    dist.broadcast(got, root, group=group)
    outs = [torch.zeros_like(mine) for _ in range(size if is_root else 0)]
    dist.gather(mine, outs or None, dst=root, group=group)
    part = torch.zeros_like(mine)
    parts = [drawn(3, 2, seed=peer + 7).to(dtype) for peer in range(size)]
    dist.scatter(part, parts if is_root else None, src=root, group=group)
    return [got, *outs, part]


def moved(root: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """What `move` has to return."""
    size, rank = dist.get_world_size(), dist.get_rank()
    all_ = [drawn(3, 2, seed=peer).to(dtype) for peer in range(size)]
    outs = all_ if rank == root else []
    return [all_[root], *outs, drawn(3, 2, seed=rank + 7).to(dtype)]


def reduce_to(group: Group, root: int) -> torch.Tensor:
    mine = drawn(40_000)
    dist.reduce(mine, root, group=group)
    return mine


def check_gathers(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    for dtype in MOVED:
        for shape in ((5,), (3, 4), (40_000,)):
            outs, flat = gathered(None, shape, dtype)
            wanted = [drawn(*shape, seed=peer).to(dtype) for peer in range(size)]
            same(outs, wanted)
            same(list(flat.chunk(size)), wanted)
            if dtype in DTYPES:
                beside = gathered(gloo, shape, dtype)
                same([*outs, flat], [*beside[0], beside[1]])
    stacked = torch.zeros(size, 3, 4)  # which gloo does not take
    dist.all_gather_into_tensor(stacked, drawn(3, 4))
    same(list(stacked), [drawn(3, 4, seed=peer) for peer in range(size)])


def gathered(
    group: Group, shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[list[torch.Tensor], torch.Tensor]:
    size, mine = dist.get_world_size(), drawn(*shape).to(dtype)
    outs = [torch.zeros_like(mine) for _ in range(size)]
    dist.all_gather(outs, mine, group=group)
    flat = torch.zeros(size * shape[0], *shape[1:]).to(dtype)
    dist.all_gather_into_tensor(flat, mine, group=group)
    return outs, flat


def check_reduce_scatters(gloo: dist.ProcessGroup) -> None:
    size = dist.get_world_size()
    for op in (ReduceOp.SUM, ReduceOp.MAX):

        def run(group: Group) -> list[torch.Tensor]:
            parts = list(drawn(size, 3, 5).unbind())
            part, other = torch.zeros(3, 5), torch.zeros(3, 5)
            dist.reduce_scatter(part, parts, op, group=group)  # noqa: B023  (at once)
            dist.reduce_scatter_tensor(other, torch.cat(parts), op, group=group)  # noqa: B023
            large = torch.zeros(30_000)
            dist.reduce_scatter_tensor(large, drawn(size * 30_000), op, group=group)  # noqa: B023
            return [part, other, large]

        both(gloo, run)


def check_all_to_all(gloo: dist.ProcessGroup) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = drawn(2 * size, 3)
    out = torch.zeros_like(mine)
    dist.all_to_all_single(out, mine)
    all_ = [drawn(2 * size, 3, seed=peer) for peer in range(size)]
    wanted = torch.cat([tensor[2 * rank : 2 * rank + 2] for tensor in all_])
    same(out, wanted)
    dist.all_to_all_single(out.zero_(), mine, group=gloo)
    same(out, wanted)
    # Rank r sends s + 1 rows to rank s.
    rows = [peer + 1 for peer in range(size)]
    source = drawn(sum(rows), 2)
    uneven = torch.zeros((rank + 1) * size, 2)
    dist.all_to_all_single(uneven, source, [rank + 1] * size, rows)
    starts = sum(rows[:rank])
    same(
        uneven,
        torch.cat(
            [
                drawn(sum(rows), 2, seed=peer)[starts : starts + rank + 1]
                for peer in range(size)
            ]
        ),
    )
    outs = [torch.zeros(rank + 1, 2) for _ in range(size)]
    dist.all_to_all(outs, list(torch.split(source, rows)))
    same(torch.cat(outs), uneven)


def check_objects(gloo: dist.ProcessGroup) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    mine = {"rank": rank, "long": "x" * rank * 1000}
    for group in (None, gloo):
        objects: list[Any] = [None] * size
        dist.all_gather_object(objects, mine, group=group)
        assert objects == [
            {"rank": peer, "long": "x" * peer * 1000} for peer in range(size)
        ]
        received = [mine, rank] if rank == 1 else [None, None]
        dist.broadcast_object_list(received, src=1, group=group)
        assert received == [{"rank": 1, "long": "x" * 1000}, 1]
        gathered: list[Any] | None = [None] * size if rank == 0 else None
        dist.gather_object(mine, gathered, dst=0, group=group)
        assert gathered == (objects if rank == 0 else None)
        part: list[Any] = [None]
        dist.scatter_object_list(part, objects if rank == 0 else None, 0, group=group)
        assert part == [mine]
    if rank == 0:
        dist.send_object_list([mine, "more"], dst=1)
    elif rank == 1:
        received = [None, None]
        dist.recv_object_list(received, src=0)
        assert received == [{"rank": 0, "long": ""}, "more"]


def check_points(gloo: dist.ProcessGroup) -> None:
    """From one rank to one other: by tag, at once, in batches, from anyone."""
    size, rank = dist.get_world_size(), dist.get_rank()
    after, before = (rank + 1) % size, (rank - 1) % size
    for group in (None, gloo):
        for dtype in (torch.float32, torch.bool, torch.complex64, torch.bfloat16):
            mine = drawn(3, 5).to(dtype)
            out = torch.zeros(3, 5).to(dtype)
            operations = [
                dist.P2POp(dist.isend, mine, after, group=group),
                dist.P2POp(dist.irecv, out, before, group=group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            same(out, drawn(3, 5, seed=before).to(dtype))
        sent: list[Any] = [
            dist.isend(torch.full((n,), rank), after, group, tag=n) for n in (3, 2)
        ]
        for count in (2, 3):
            got = torch.zeros(count, dtype=torch.int64)
            assert dist.recv(got, before, group, tag=count) == before
            same(got, torch.full((count,), before))
        for sending in sent:
            sending.wait()
    large = torch.arange(1_000_000.0) + rank
    if rank == 0:
        seen = set()
        for _ in range(size - 1):
            got = torch.zeros(1_000_000)
            sender = dist.recv(got)
            same(got, torch.arange(1_000_000.0) + sender)
            seen.add(sender)
        assert seen == set(range(1, size))
    else:
        dist.send(large, 0)
    strided = torch.zeros(4, 6)
    if rank == 0:
        dist.send(drawn(6, 4, seed=3).t()[:, ::2], 1)
    elif rank == 1:
        dist.recv(strided[:, 1:4], 0)
        same(strided[:, 1:4], drawn(6, 4, seed=3).t()[:, ::2])
        assert not strided[:, 4:].any()


def check_coalesced(_gloo: dist.ProcessGroup) -> None:
    size, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cpu")
    for how in (None, device):
        several = [torch.full((n,), float(rank)) for n in (1, 40_000, 3)]
        with _coalescing_manager(device=how):
            for tensor in several:
                dist.all_reduce(tensor)
        total = float(sum(range(size)))
        same(several, [torch.full_like(tensor, total) for tensor in several])
        outs = [torch.zeros(size * n) for n in (1, 4)]
        with _coalescing_manager(device=how, async_ops=True) as coalesced:
            for n, out in zip((1, 4), outs, strict=True):
                dist.all_gather_into_tensor(out, torch.full((n,), float(rank)))
        coalesced.wait()
        same(outs[1], torch.arange(float(size)).repeat_interleave(4))
        parts = [torch.zeros(n) for n in (1, 4)]
        with _coalescing_manager(device=how):
            for n, part in zip((1, 4), parts, strict=True):
                dist.reduce_scatter_tensor(part, torch.ones(n * size))
        same(parts, [torch.full((n,), float(size)) for n in (1, 4)])
    once, memory = torch.full((3,), float(rank)), torch.full((4,), float(rank))
    for how in (None, device):
        with _coalescing_manager(device=how):  # one twice, and parts that overlap
            for tensor in (once, once, memory[:3], memory[1:]):
                dist.all_reduce(tensor)
        same([once, memory], [once * 0 + total, memory * 0 + total])
        once.fill_(rank)
        memory.fill_(rank)
    with _coalescing_manager(device=device):
        pass  # nothing is nothing
    tensors = [torch.ones(2), torch.ones(3)]
    lists = [[torch.zeros(2), torch.zeros(3)] for _ in range(size)]
    work = world().allgather_coalesced(lists, tensors)
    assert work is not None
    work.wait()
    same(lists, [tensors] * size)


def check_former_names(_gloo: dist.ProcessGroup) -> None:
    """What torch called until version 2.12."""
    size, group = dist.get_world_size(), world()
    mine, out, part = torch.ones(2), torch.zeros(2 * size), torch.zeros(2)
    works = [
        group._allgather_base(out, mine),  # noqa: SLF001  torch calls it so
        group._reduce_scatter_base(part, torch.ones(2 * size)),  # noqa: SLF001  likewise
        group.allgather_into_tensor_coalesced([out], [mine]),
        group.reduce_scatter_tensor_coalesced([part], [torch.ones(2 * size)]),
        group.alltoall_base(out, torch.ones(2 * size), [], []),
        group.allreduce_coalesced([mine]),
    ]
    for work in works:
        assert work is not None
        work.wait()
    same([mine, part, out], [mine * 0 + size, mine * 0 + size, torch.ones(2 * size)])
    assert group.get_group_store().add("a key of the program", 1) >= 1
    assert group.group_name in repr(group)


def check_short_forms(gloo: dist.ProcessGroup) -> None:
    """What torch's own groups take: a tensor for a list of one, options by name."""
    size, rank, ours = dist.get_world_size(), dist.get_rank(), world()
    results = []
    for group in (gloo, ours):
        mine, out = torch.full((3,), float(rank)), torch.zeros(3)
        reduced, largest, rooted, shared = (mine.clone() for _ in range(4))
        parts = [torch.full((3,), float(rank + peer)) for peer in range(size)]
        gathered, at_root = ([torch.zeros(3) for _ in range(size)] for _ in range(2))
        for work in (
            group.allreduce(reduced),
            group.allreduce(tensor=largest, op=dist.ReduceOp.MAX),
            group.reduce(rooted, 1, dist.ReduceOp.SUM),
            group.broadcast(shared, root=1),
            group.allgather(gathered, mine, timedelta(seconds=60)),
            group.gather(at_root if rank == 0 else [], input_tensor=mine, root=0),
            group.scatter(out, parts if rank == 1 else [], 1),
        ):
            work.wait()
        if rank != 1:
            rooted = out  # only the root's counts
        results.append([reduced, largest, rooted, shared, gathered, at_root, out])
    same(results[1], results[0])
    tensor = torch.ones(1)
    wrongs: list[Callable[[], Any]] = [
        lambda: ours.allreduce([tensor, tensor]),
        lambda: ours.broadcast(tensor, root=size),
        lambda: ours.allreduce(tensor, root=0),
        lambda: ours.allreduce(tensor, [0]),
        ours.broadcast,
    ]
    for wrong in wrongs:
        with pytest.raises(
            (ValueError, TypeError), match=r"takes|has root|incompatible"
        ):
            wrong()


def check_functional(_gloo: dist.ProcessGroup) -> None:
    """Functional collectives, which come by torch's C++ code."""
    functional: Any = importlib.import_module(
        "torch.distributed._functional_collectives"
    )

    size, rank = dist.get_world_size(), dist.get_rank()
    group = list(range(size))
    mine = torch.full((2, 2), float(rank))
    total = torch.full((2, 2), float(sum(range(size))))
    same(functional.wait_tensor(functional.all_reduce(mine, "sum", group)), total)
    same(
        functional.wait_tensor(functional.all_reduce(mine, "avg", group)), total / size
    )
    gathered = functional.wait_tensor(functional.all_gather_tensor(mine, 0, group))
    same(gathered, torch.cat([torch.full((2, 2), float(peer)) for peer in group]))
    part = functional.reduce_scatter_tensor(gathered, "sum", 0, group)
    same(functional.wait_tensor(part), torch.full((2, 2), float(rank * size)))
    shared = functional.wait_tensor(functional.broadcast(mine, 1, group))
    same(shared, torch.full((2, 2), 1.0))
    source = torch.arange(float(size))
    rows = [1] * size
    moved = functional.all_to_all_single(source, rows, rows, group)
    same(functional.wait_tensor(moved), torch.full((size,), float(rank)))
    several = functional.all_reduce_coalesced([mine, mine * 2], "sum", group)
    same([functional.wait_tensor(tensor) for tensor in several], [total, total * 2])


def check_subgroups(_gloo: dist.ProcessGroup) -> None:
    """Groups of some ranks share the worker, and leave the others be."""
    size, rank = dist.get_world_size(), dist.get_rank()
    reverse = dist.new_group([size - 1, 0])
    again = dist.new_group([size - 1, 0], group_desc="another of the same")
    if rank in {0, size - 1}:
        assert reverse is not None
        assert again is not None
        assert reverse.participant is world().participant
        assert again.group_desc == "another of the same"
        first = torch.full((3,), float(rank))
        second = torch.full((3,), 10.0 * rank)
        works = [
            dist.all_reduce(second, group=again, async_op=True),
            dist.all_reduce(first, group=reverse, async_op=True),
        ]
        for work in works:
            work.wait()
        same(first, torch.full((3,), float(size - 1)))
        same(second, torch.full((3,), 10.0 * (size - 1)))
        received = torch.full((1,), float(rank))
        dist.broadcast(received, src=size - 1, group=reverse)
        same(received, torch.full((1,), float(size - 1)))
        assert dist.get_group_rank(reverse, 0) == dist.get_rank(reverse) or rank != 0
        if rank == 0:
            dist.send(torch.ones(1), size - 1, group=reverse)
        else:
            assert dist.recv(received, group=reverse) == 0
        dist.destroy_process_group(again)
        dist.barrier(reverse)
    _alone, groups = dist.new_subgroups(1)  # type: ignore[no-untyped-call]  # torch's
    assert len(groups) == size
    mesh = dist.device_mesh.init_device_mesh("cpu", (size,), mesh_dim_names=("all",))
    got = torch.ones(1)
    dist.all_reduce(got, group=mesh["all"].get_group())
    same(got, torch.full((1,), float(size)))


SCENARIOS = [
    check_all_reduce,
    check_average,
    check_layouts,
    check_resizing,
    check_sparse,
    check_roots,
    check_gathers,
    check_reduce_scatters,
    check_all_to_all,
    check_objects,
    check_points,
    check_coalesced,
    check_former_names,
    check_short_forms,
    check_functional,
    check_subgroups,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_function_gives_the_result_of_gloo(scenario: Scenario) -> None:
    launch(play, args=(scenario,), nprocs=3, method="forkserver", timeout_s=60.0)
