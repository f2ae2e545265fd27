"""What the ranks of a simulated group do, one collective after the other.

Every rank can make the tensors of all; so each can tell what one process would have got
from them.  Where sums are exact it is that to the last bit, in whatever order.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch

from asyncrpc import Group

Tensors: TypeAlias = "list[torch.Tensor]"

# None, less than ranks, and what goes around a ring in a simulation.
SIZES: Final = (0, 1, 5, 300, 10_000)
RING_BYTES: Final = 10_000
DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8)
FUNCTIONS: Final[Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "sum": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "avg": torch.add,
}
VALUE_MAX: Final = 8  # times 16 ranks: every dtype has all integers up to that
# No rank ends one of these before all have begun it.
FOR_ALL: Final = frozenset(
    {"barrier", "all_reduce", "all_gather", "all_to_all", "reduce_scatter"}
)
WITH_ROOT: Final = frozenset({"broadcast", "reduce", "gather", "scatter"})
REDUCED: Final = frozenset({"all_reduce", "reduce", "reduce_scatter"})
UNEVEN: Final = frozenset({"all_gather", "gather", "scatter", "all_to_all"})
NUMBERED: Final = (*sorted(FOR_ALL), *sorted(WITH_ROOT))
KINDS: Final = (*NUMBERED, "points")


@dataclass(frozen=True, slots=True)
class Op:
    """One collective, as every rank knows it.

    Attributes:
        number: of the program.
        kind: a method of `Group`; `points` is a tensor to the next rank.
        sizes: elements of the tensors of each rank.
        dtype: of them.
        how: of a reduction.
        root: of what has one.
        is_rough: whether the order of a sum can be told from its bits.
    """

    number: int
    kind: str
    sizes: tuple[int, ...]
    dtype: torch.dtype
    how: str
    root: int
    is_rough: bool

    def __str__(self) -> str:
        return f"{self.kind} {self.number} ({self.dtype}, {self.how}, {self.sizes})"

    def tensor(self, rank: int, part: int = 0) -> torch.Tensor:
        """Make one of the tensors that a rank gives."""
        draw = torch.Generator().manual_seed(self.number << 16 | rank << 8 | part)
        size = self.sizes[rank]
        if self.is_rough:
            return torch.randn(size, generator=draw, dtype=self.dtype)
        low, high = 0 if self.dtype is torch.uint8 else -VALUE_MAX, VALUE_MAX
        if self.how == "product":
            low, high = 1, 2
        return torch.randint(low, high + 1, (size,), generator=draw).to(self.dtype)

    def inputs(self, rank: int) -> Tensors:
        """Make what a rank gives, one tensor for each rank."""
        return [self.tensor(rank, part) for part in range(len(self.sizes))]

    def expected(self, rank: int) -> Tensors:
        """Return what a rank is to get, worked out in one process."""
        ranks = range(len(self.sizes))
        match self.kind:
            case "barrier":
                results = []
            case "broadcast":
                results = [self.tensor(self.root)]
            case "scatter":
                results = [self.tensor(self.root, rank)]
            case "points":
                results = [self.tensor((rank - 1) % len(ranks))]
            case "all_to_all":
                results = [self.tensor(peer, rank) for peer in ranks]
            case "gather" | "all_gather":
                is_given = self.kind == "all_gather" or rank == self.root
                results = [self.tensor(peer) for peer in ranks] if is_given else []
            case "reduce" if rank != self.root:
                results = [self.tensor(rank)]
            case _:
                part = rank if self.kind == "reduce_scatter" else 0
                results = [self.reduced([self.tensor(peer, part) for peer in ranks])]
        return results

    def reduced(self, tensors: Tensors) -> torch.Tensor:
        """Reduce tensors in the order of the ranks."""
        result = functools.reduce(FUNCTIONS[self.how], tensors)
        return result / len(tensors) if self.how == "avg" else result


def program(
    rng: random.Random, ranks: int, count: int, kinds: Sequence[str] = KINDS
) -> list[Op]:
    """Draw so many collectives."""
    return [
        draw_op(rng, ranks, number, kind=rng.choice(kinds)) for number in range(count)
    ]


def draw_op(rng: random.Random, ranks: int, number: int, *, kind: str) -> Op:
    dtype = rng.choice(DTYPES)
    size = rng.choice(SIZES)
    sizes = [size] * ranks
    if kind in UNEVEN:
        sizes = [rng.choice(SIZES) if rng.random() < 0.3 else size for _ in sizes]
    how = rng.choice(sorted(FUNCTIONS))
    if how == "avg" and not dtype.is_floating_point:
        how = "sum"
    if how == "product":  # 2 to the power of 16 has a place in these alone
        dtype = rng.choice([torch.float64, torch.int64])
    is_rough = kind == "all_reduce" and how == "sum" and dtype.is_floating_point
    is_rough = is_rough and rng.random() < 0.5
    root = rng.randrange(ranks)
    return Op(number, kind, tuple(sizes), dtype, how, root, is_rough)


def another(rng: random.Random, op: Op) -> Op:
    """Return what somebody takes the op for who is wrong about it."""
    ranks = len(op.sizes)
    ways = ["kind"]
    if op.kind not in ("barrier", "scatter"):
        ways.append("dtype")
    if op.kind in WITH_ROOT and ranks > 1:
        ways.append("root")
    if op.kind in REDUCED:
        ways.append("how")
    if op.kind in REDUCED or op.kind == "broadcast":
        ways.append("size")
    way = rng.choice(ways)
    if way == "dtype":
        dtype = torch.float32 if op.dtype is torch.float64 else torch.float64
        return replace(op, dtype=dtype, is_rough=False)
    if way == "root":
        return replace(op, root=(op.root + 1) % ranks)
    if way == "size":
        return replace(op, sizes=tuple(size + 1 for size in op.sizes), is_rough=False)
    if way == "how":
        return replace(op, how="max" if op.how != "max" else "min", is_rough=False)
    kind = "barrier" if op.kind != "barrier" else "all_reduce"
    return replace(op, kind=kind, is_rough=False)


async def perform(group: Group, op: Op) -> Tensors:
    """Take part in a collective; return what this rank has got."""
    rank = group.rank
    result: torch.Tensor | Tensors | None
    match op.kind:
        case "points":
            result = await pass_on(group, op)
        case "scatter":
            source = op.inputs(rank) if rank == op.root else None
            result = await group.scatter(source, op.root)
        case "all_to_all":
            result = await group.all_to_all(op.inputs(rank))
        case "reduce_scatter":
            result = await group.reduce_scatter(op.inputs(rank), op.how)
        case _:
            args: list[Any] = [] if op.kind == "barrier" else [op.tensor(rank)]
            args += [op.root] * (op.kind in WITH_ROOT)
            args += [op.how] * (op.kind in REDUCED)
            result = await getattr(group, op.kind)(*args)
    return [result] if isinstance(result, torch.Tensor) else list(result or [])


async def pass_on(group: Group, op: Op) -> torch.Tensor:
    """Send a tensor to the next rank; return what the one before sends."""
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    got = asyncio.ensure_future(group.recv(before, tag=op.number))
    try:
        await group.send(op.tensor(group.rank), after, tag=op.number)
        return await got
    finally:
        got.cancel()


def problem_with(op: Op, rank: int, got: Tensors) -> str:
    """Say what is wrong with what a rank has got; empty: nothing is."""
    wanted = op.expected(rank)
    if len(got) != len(wanted):
        return f"rank {rank} got {len(got)} tensors of {op}, not {len(wanted)}"
    for number, (first, other) in enumerate(zip(got, wanted, strict=True)):
        if first.dtype != other.dtype or first.shape != other.shape:
            return f"rank {rank} got {first.dtype} {tuple(first.shape)} of {op}"
        if op.is_rough:
            # Of n values, n - 1 sums are rounded, each to at most half a unit.
            eps = torch.finfo(op.dtype).eps
            allowed = (
                len(op.sizes)
                * eps
                * sum(op.tensor(peer).abs().double() for peer in range(len(op.sizes)))
            )
            is_right = bool(((first.double() - other.double()).abs() <= allowed).all())
        else:
            is_right = bits_of(first) == bits_of(other)
        if not is_right:
            return f"rank {rank} got something else of {op}, tensor {number}"
    return ""


def bits_of(tensor: torch.Tensor) -> bytes:
    """Return all bits of a tensor."""
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())
