"""What every rank of a group does in a test, and what it must come to.

Every rank makes the tensors of all from one seed; so each can tell what is right.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Iterator

import torch

import asyncrpc
from asyncrpc.collectives import Group

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
)
MOVED_ONLY = (torch.float8_e4m3fn, torch.float8_e5m2)
# Elements: one, fewer than ranks, in a slot, more than a slot, of several windows.
SIZES = (1, 2, 1000, 300_007)
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
EXACT: dict[str, Function] = {"sum": torch.add, "product": torch.mul}
ORDER: dict[str, Function] = {"min": torch.minimum, "max": torch.maximum}
BITS: dict[str, Function] = {
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}


def tensors(group: Group, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The tensors of all ranks, the same at every rank."""
    draw = torch.Generator().manual_seed(numel)
    drawn = [torch.randn(numel, generator=draw) * 9 for _ in range(group.size)]
    return [
        tensor.abs().to(dtype) if not dtype.is_signed else tensor.to(dtype)
        for tensor in drawn
    ]


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors are alike to the last bit."""
    return (
        left.dtype == right.dtype
        and left.shape == right.shape
        and torch.equal(
            left.contiguous().view(-1).view(torch.uint8),
            right.contiguous().view(-1).view(torch.uint8),
        )
    )


def in_order(function: Function, operands: list[torch.Tensor]) -> torch.Tensor:
    return functools.reduce(function, operands)


async def check_moves(group: Group) -> None:
    """What only moves tensors brings every bit, of every dtype and shape."""
    for numel, dtype in itertools.product(SIZES, (*DTYPES, *MOVED_ONLY)):
        mine = group.rank
        all_ = tensors(group, numel, dtype)
        for root in range(group.size):
            got = all_[mine].clone()
            assert same(await group.broadcast(got, root), all_[root])
            gathered = await group.gather(all_[mine], root)
            assert (gathered is None) == (mine != root)
            if gathered is not None:
                assert all(map(same, gathered, all_))
            inputs = all_ if mine == root else None
            assert same(await group.scatter(inputs, root), all_[mine])
        assert all(map(same, await group.all_gather(all_[mine]), all_))
        parts = [all_[mine][: max(numel - peer, 0)] for peer in range(group.size)]
        wanted = [tensor[: max(numel - mine, 0)] for tensor in all_]
        assert all(map(same, await group.all_to_all(parts), wanted))


async def check_uneven(group: Group) -> None:
    """Ranks may have tensors of other shapes, or nothing at all."""
    for rows in (2, 40_000):
        mine = torch.full((group.rank * rows, 3), float(group.rank))
        got = await group.all_gather(mine)
        assert [tensor.shape for tensor in got] == [
            (rank * rows, 3) for rank in range(group.size)
        ]
        assert all((tensor == rank).all() for rank, tensor in enumerate(got))
        inputs = None
        if group.rank == 1:
            inputs = [
                torch.ones(peer, 2, dtype=torch.int16) for peer in range(group.size)
            ]
        part = await group.scatter(inputs if group.rank == 1 else None, 1)
        assert part.shape == (group.rank, 2)
        assert part.dtype == torch.int16
        assert (part == 1).all()


def reductions(dtype: torch.dtype) -> Iterator[tuple[str, Function]]:
    yield from EXACT.items()
    if not dtype.is_complex:
        yield from ORDER.items()
    if not dtype.is_complex and not dtype.is_floating_point:
        yield from BITS.items()


async def check_sums(group: Group, *, in_rank_order: bool) -> None:
    """Reductions equal torch's; where the order is that of the ranks, to the bit."""
    for numel, dtype in itertools.product(SIZES, DTYPES):
        all_ = tensors(group, numel, dtype)
        for op, function in reductions(dtype):
            wanted = in_order(function, [countable(part) for part in all_]).to(dtype)
            got = all_[group.rank].clone()
            assert await group.all_reduce(got, op) is got
            close(got, wanted, exactly=in_rank_order)
            for root in range(group.size):
                got = all_[group.rank].clone()
                await group.reduce(got, root, op)
                if group.rank == root:
                    close(got, wanted, exactly=in_rank_order)
                else:
                    assert same(got, all_[group.rank])
            parts = [tensor.clone() for tensor in all_]
            got = await group.reduce_scatter(parts, op)
            mine = [countable(all_[group.rank])] * group.size
            close(got, in_order(function, mine).to(dtype), exactly=in_rank_order)
        if dtype.is_floating_point:
            wanted = in_order(torch.add, all_) / group.size
            got = await group.all_reduce(all_[group.rank].clone(), "avg")
            close(got, wanted, exactly=in_rank_order)


def countable(tensor: torch.Tensor) -> torch.Tensor:
    """Return what torch can calculate with."""
    return tensor.int() if tensor.dtype is torch.uint16 else tensor


def close(got: torch.Tensor, wanted: torch.Tensor, *, exactly: bool) -> None:
    if exactly or not (got.is_floating_point() or got.is_complex()):
        assert same(got, wanted), (got, wanted)
    else:
        # In another order, each of the few additions is off by half a unit at most.
        allowed = 4 * torch.finfo(got.dtype).eps * float(wanted.abs().max())
        torch.testing.assert_close(got, wanted, rtol=0.0, atol=allowed)


async def check_bits(group: Group) -> None:
    """The result has the same bits at every rank, whatever the order of its sum."""
    for numel in (*SIZES, 1_000_003):
        mine = torch.randn(numel, generator=torch.Generator().manual_seed(group.rank))
        got = await group.all_reduce(mine)
        assert all(same(other, got) for other in await group.all_gather(got))


async def check_layouts(group: Group) -> None:
    """Tensors need not be contiguous; what is between their elements stays."""
    whole = torch.arange(400 * 300, dtype=torch.float32).view(400, 300).clone()
    before = whole.clone()
    view = whole.t()[::3, 5:]
    assert not view.is_contiguous()
    wanted = before.t()[::3, 5:] * group.size
    assert await group.all_reduce(view) is view
    assert same(view, wanted)
    before.t()[::3, 5:] = wanted
    assert same(whole, before)
    flipped = torch.randn(50, dtype=torch.complex64).conj()
    kept = flipped.clone()
    await group.broadcast(flipped, 0)
    assert (await group.all_gather(flipped))[0].equal(flipped.resolve_conj())
    if group.rank == 0:
        assert flipped.equal(kept)
    leaf = torch.ones(5, requires_grad=True)
    await group.all_reduce(leaf)
    assert leaf.requires_grad
    assert (leaf == group.size).all()


async def check_many(group: Group) -> None:
    """Several at once are matched by the order in which they began."""
    sizes = [1, 200_000, 3, 500_000, 70, 100_000] * 8  # more than may run at a time
    inputs = [torch.full((size,), float(number)) for number, size in enumerate(sizes)]
    async with asyncio.TaskGroup() as tasks:
        for tensor in inputs:
            tasks.create_task(group.all_reduce(tensor))
        barrier = tasks.create_task(group.barrier())
    assert barrier.done()
    for number, tensor in enumerate(inputs):
        assert (tensor == number * group.size).all()


async def check_points(group: Group) -> None:
    """What is sent comes in order, by sender and tag."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    async def give() -> None:
        for number in range(5):
            await group.send(torch.full((number,), group.rank), after, tag=number % 2)

    giving = asyncio.ensure_future(give())
    evens = [await group.recv(before, tag=0) for _ in range(1)]
    odd = await group.recv(before, tag=1)
    evens.append(await group.recv(None, tag=0))
    assert [len(tensors) for tensors in evens] == [0, 2]
    assert odd.tolist() == [before]
    out = torch.zeros(3, dtype=torch.int64)
    assert await group.recv(before, tag=1, out=out) is out
    assert out.tolist() == [before] * 3
    assert len(await group.recv(before)) == 4
    await giving
    large = torch.arange(1_000_000.0)
    sent, got = await asyncio.gather(group.send(large, after), group.recv(before))
    assert sent is None
    assert same(got, large)


async def play(scenario: str, **options: bool) -> None:
    """Play a scenario at the worker that runs this."""
    group = Group(asyncrpc.current_worker(), name=scenario, timeout_s=60.0)
    async with group:
        await globals()[scenario](group, **options)
        await group.barrier()
