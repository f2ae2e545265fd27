"""The operations of torch's process groups, done by the collectives of a `Group`.

Torch gives tensors to be filled, where a `Group` returns new ones: these are copied.  A
call that needs several collectives begins all of them at once: so all ranks begin the
same ones in the same order, whichever ends first.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.distributed import ReduceOp

from asyncrpc.core.worker import Worker
from asyncrpc.errors import CollectiveError, CollectiveTimeoutError, UsageError
from asyncrpc.parallel.collectives import tensors as shapes
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.collectives.torch_backend.rank_runtime import Doing

Tensors: TypeAlias = Sequence[torch.Tensor]

# More than this is copied in a thread: the loop has other things to do meanwhile.
ON_LOOP_BYTES_MAX: Final = 256 << 10
# What goes before a tensor that one rank sends to another: who sends it, and its dtype.
_RANK_BYTES: Final = 8
_HEAD_BYTES: Final = 32

_HOW: Final[dict[Any, str]] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "avg",
    ReduceOp.PRODUCT: "product",
    ReduceOp.MIN: "min",
    ReduceOp.MAX: "max",
    ReduceOp.BAND: "band",
    ReduceOp.BOR: "bor",
    ReduceOp.BXOR: "bxor",
}


class CollectiveOps:
    """One process group: a coroutine for each operation, run on the loop."""

    def __init__(self, worker: Worker, group: Group) -> None:
        self._worker = worker
        self.group = group

    # --- reductions ------------------------------------------------------------------

    async def all_reduce(self, tensors: Tensors, op: ReduceOp) -> None:
        """Reduce each tensor in place, at all ranks.

        Of tensors that share elements each is reduced as it was at the begin.
        """
        by = how(op)
        if len(tensors) == 1 and tensors[0].layout is torch.strided:
            await self.group.all_reduce(_alias(tensors[0]), by)
            return
        reduced = _apart(tensors)
        await _together(
            self._all_reduce_sparse(tensor, by)
            if tensor.layout is torch.sparse_coo
            else self.group.all_reduce(_alias(tensor), by)
            for tensor in reduced
        )
        if reduced is not tensors:
            await self._fill(tensors, reduced)

    async def _all_reduce_sparse(self, tensor: torch.Tensor, by: str) -> None:
        """Sum sparse tensors in place: each rank gets the elements of all."""
        if by not in {"sum", "avg"}:
            raise UsageError(
                f"sparse tensors can only be summed; {by!r} needs dense ones"
            )
        mine = tensor.detach().coalesce()
        indices, values = await _together(
            [
                self.group.all_gather(mine.indices()),
                self.group.all_gather(mine.values()),
            ]
        )
        # What others send is checked: an index out of range would write anywhere.
        total = torch.sparse_coo_tensor(
            torch.cat(indices, dim=1),
            torch.cat(values),
            mine.shape,
            check_invariants=True,
            device=mine.device,
        ).coalesce()
        with torch.no_grad():  # a detached one would get elements of its own
            tensor.copy_(total / self.group.size if by == "avg" else total)

    async def reduce(self, tensors: Tensors, root: int, op: ReduceOp) -> None:
        """Reduce each tensor, in place at `root`."""
        by = how(op)
        await _together(
            self.group.reduce(_alias(tensor), root, by) for tensor in tensors
        )

    async def reduce_scatter(
        self, outs: Tensors, tensors: Sequence[Tensors], op: ReduceOp
    ) -> None:
        """Leave this rank's part of the reduced tensors of each list in its `out`."""
        by = how(op)
        parts = [list(map(_alias, rank_tensors)) for rank_tensors in tensors]
        reduced = await _together(self.group.reduce_scatter(part, by) for part in parts)
        await self._fill(outs, reduced)

    async def reduce_scatter_flat(
        self, outs: Tensors, tensors: Tensors, op: ReduceOp
    ) -> None:
        """Do the same with tensors that are cut in equal parts, each into its `out`."""
        by, size = how(op), self.group.size
        parts = [
            _equal_parts(_alias(tensor), out, size)
            for out, tensor in zip(outs, tensors, strict=True)
        ]
        reduced = await _together(self.group.reduce_scatter(part, by) for part in parts)
        await self._fill(outs, reduced)

    # --- moves -----------------------------------------------------------------------

    async def broadcast(self, tensors: Tensors, root: int) -> None:
        """Fill tensors with those of one rank."""
        await _together(
            self.group.broadcast(_alias(tensor), root) for tensor in tensors
        )

    async def all_gather(self, outs: Sequence[Tensors], tensors: Tensors) -> None:
        """Fill, for each tensor, a list with those of all ranks."""
        for filled in outs:
            self._check_one_each(filled, "outputs")
        gathered = await _together(self.group.all_gather(tensor) for tensor in tensors)
        await self._fill(
            [out for filled in outs for out in filled],
            [tensor for got in gathered for tensor in got],
        )

    async def all_gather_flat(self, outs: Tensors, tensors: Tensors) -> None:
        """Fill, for each tensor, one with those of all ranks, one after the other."""
        size = self.group.size
        parts = [
            _equal_parts(out, tensor, size)
            for out, tensor in zip(outs, tensors, strict=True)
        ]
        gathered = await _together(self.group.all_gather(tensor) for tensor in tensors)
        await self._fill(
            [out for filled in parts for out in filled],
            [tensor for got in gathered for tensor in got],
        )

    async def gather(self, outs: Tensors, tensor: torch.Tensor, root: int) -> None:
        """Fill tensors at `root` with those of all ranks."""
        if self.group.rank == root:
            self._check_one_each(outs, "outputs")
        gathered = await self.group.gather(tensor, root)
        await self._fill(outs, gathered or [])

    async def scatter(
        self, out: torch.Tensor, tensors: Tensors | None, root: int
    ) -> None:
        """Fill a tensor with this rank's part of what `root` gives."""
        part = await self.group.scatter(tensors, root)
        await self._fill([out], [part])

    async def all_to_all(self, outs: Tensors, tensors: Tensors) -> None:
        """Send each rank its tensor, and take one from each."""
        self._check_one_each(outs, "outputs")
        received = await self.group.all_to_all(tensors)
        await self._fill(outs, received)

    async def all_to_all_flat(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_rows: Sequence[int],
        rows: Sequence[int],
    ) -> None:
        """Do the same with two tensors that are cut along their first dimension.

        Args:
            out_rows: the length of each part of `out`; empty: all are equal.
            rows: the length of each part of `tensor`; empty: all are equal.
        """
        size = self.group.size
        await self.all_to_all(_rows(out, out_rows, size), _rows(tensor, rows, size))

    async def barrier(self) -> None:
        """Wait for all ranks."""
        await self.group.barrier()

    async def all_of(self, doings: Sequence[Doing]) -> None:
        """Do several operations, begun in their order."""
        await _together(doing() for doing in doings)

    # --- from one to one -------------------------------------------------------------

    async def send(self, tensors: Tensors, to: int, tag: int) -> None:
        """Send tensors to a rank."""
        await _together(
            self.group.send(_letter(tensor, self.group.rank), to, tag=tag)
            for tensor in tensors
        )

    async def recv(self, outs: Tensors, from_: int | None, tag: int) -> int:
        """Fill tensors with what a rank, or any, sends; return the last one's rank."""
        sender = -1
        letters = await _together(self.group.recv(from_, tag=tag) for _ in outs)
        for out, letter in zip(outs, letters, strict=True):
            sender, received = _open_letter(letter, out)
            await self._fill([out], [received])
        return sender

    # --- parts -----------------------------------------------------------------------

    async def within(self, limit_s: float, doing: Doing) -> int | None:
        """Run a collective under a time limit of its own."""
        try:
            async with asyncio.timeout(limit_s) as limit:
                return await doing()
        except TimeoutError as error:
            if not limit.expired():
                raise
            raise CollectiveTimeoutError(
                f"the collective exceeded its timeout of {limit_s:g} s, set at rank "
                f"{self.group.rank} ({self.group.members[self.group.rank]!r})",
                ranks=(),
            ) from error

    def _check_one_each(self, tensors: Tensors, noun: str) -> None:
        if len(tensors) != self.group.size:
            raise UsageError(
                f"got {len(tensors)} {noun}, and needs one for each of the "
                f"{self.group.size} ranks"
            )

    async def _fill(self, outs: Tensors, tensors: Tensors) -> None:
        for rank, (out, got) in enumerate(zip(outs, tensors, strict=True)):
            if out.numel() != got.numel() or out.dtype != got.dtype:
                raise CollectiveError(
                    f"output {rank} is {shapes.text(out)}, but the received tensor is "
                    f"{shapes.text(got)}"
                )

        def copy() -> None:
            for out, got in zip(outs, tensors, strict=True):
                out.detach().copy_(got.view(out.shape))

        if sum(tensor.nbytes for tensor in tensors) <= ON_LOOP_BYTES_MAX:
            copy()
        else:
            await self.group.host.run_in_thread(copy)


def how(op: ReduceOp) -> str:
    """Return asyncrpc's name of a reduction."""
    for known, name in _HOW.items():
        if (
            op == known
        ):  # not found by its hash: the one is of a class, the other is not
            return name
    raise UsageError(
        "asyncrpc has no ReduceOp.PREMUL_SUM: multiply the tensors first, and use "
        "ReduceOp.SUM"
    )


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor over the same memory, of another storage.

    A storage that numpy has seen cannot be resized any more, and torch's trainers and
    hooks resize what they have reduced.  The caller keeps the tensor meanwhile.
    """
    shapes.check(tensor)
    plain = tensor.detach()
    if not plain.is_contiguous() or plain.is_conj() or plain.is_neg():
        return plain  # it is copied, and the copy is what numpy sees
    if not plain.numel():
        return plain
    memory = (ctypes.c_char * plain.nbytes).from_address(plain.data_ptr())
    return torch.frombuffer(memory, dtype=plain.dtype).view(plain.shape)


def _apart(tensors: Tensors) -> Tensors:
    """Return tensors that share no element: the given ones, or copies of all.

    Sparse ones are taken to share none.
    """
    if any(tensor.layout is not torch.strided for tensor in tensors):
        return tensors
    end = 0
    for tensor in sorted(filter(torch.numel, tensors), key=torch.Tensor.data_ptr):
        if tensor.data_ptr() < end:
            return [each.detach().clone() for each in tensors]
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        end = tensor.data_ptr() + (last + 1) * tensor.element_size()
    return tensors


async def _together(coroutines: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
    """Begin several collectives in their order, now; wait for all of them."""
    listed = list(coroutines)
    if len(listed) == 1:
        return [await listed[0]]
    return await asyncio.gather(*listed)


def _equal_parts(whole: torch.Tensor, part: torch.Tensor, size: int) -> Tensors:
    """Cut a tensor in as many parts as there are ranks, of the length of another.

    The parts are of the tensor's own memory.
    """
    if whole.numel() != size * part.numel() or whole.dtype != part.dtype:
        raise UsageError(
            f"{shapes.text(whole)} is not {size} times {shapes.text(part)}, one for "
            "each rank"
        )
    if not whole.is_contiguous():
        raise UsageError(f"{shapes.text(whole)} is not contiguous")
    return (
        [flat.view(part.shape) for flat in shapes.cut(whole.detach().view(-1), size)]
        if part.numel()
        else [part] * size
    )


def _rows(tensor: torch.Tensor, rows: Sequence[int], size: int) -> Tensors:
    """Cut a tensor along its first dimension."""
    length = len(tensor) if tensor.dim() else 0
    if not rows:
        if length % size:
            raise UsageError(
                f"{shapes.text(tensor)} cannot be cut into {size} equal parts: give "
                "the length of each"
            )
        rows = [length // size] * size
    if len(rows) != size or sum(rows) != length:
        raise UsageError(
            f"{shapes.text(tensor)} cannot be cut into parts of lengths {list(rows)} "
            f"for {size} ranks"
        )
    parts: Tensors = tensor.detach().split(list(rows))  # type: ignore[no-untyped-call]  # torch's
    return parts


def _letter(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the bytes of a tensor, after its sender and its metadata.

    `Group.recv` does not return the sender's rank, and accepts one shape only.  Torch
    asks for the rank, and accepts any shape of the same length.
    """
    shapes.check(tensor)
    head = rank.to_bytes(_RANK_BYTES, "little") + str(tensor.dtype).encode()
    letter = torch.empty(_HEAD_BYTES + tensor.nbytes, dtype=torch.uint8, device="cpu")
    letter[:_HEAD_BYTES] = torch.frombuffer(
        bytearray(head.ljust(_HEAD_BYTES)), dtype=torch.uint8
    )
    if tensor.nbytes:
        letter[_HEAD_BYTES:].view(tensor.dtype).view(tensor.shape).copy_(
            tensor.detach()
        )
    return letter


def _open_letter(letter: torch.Tensor, out: torch.Tensor) -> tuple[int, torch.Tensor]:
    """Return the sender's rank, and the tensor in the shape of `out`."""
    head = bytes(letter[:_HEAD_BYTES].tolist())
    rank = int.from_bytes(head[:_RANK_BYTES], "little")
    dtype = head[_RANK_BYTES:].decode().strip()
    nbytes = letter.numel() - _HEAD_BYTES
    if dtype != str(out.dtype) or nbytes != out.nbytes:
        raise CollectiveError(
            f"rank {rank} sent {nbytes} bytes of {dtype}, but the output is "
            f"{shapes.text(out)}, of {out.nbytes} bytes"
        )
    if not nbytes:
        return rank, torch.empty(out.shape, dtype=out.dtype, device="cpu")
    return rank, letter[_HEAD_BYTES:].view(out.dtype).view(out.shape)
