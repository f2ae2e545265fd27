"""Collectives between processes of one host, through memory that all of them see.

A small tensor is published in the rank's slot of the board, where all ranks read it
after one wait.  A large tensor goes through *windows*: each rank copies pieces of the
others' shares into its windows, while the others do the same; each combines the pieces
of its own share, and puts the result into a window, from which the others take it.  The
windows stay in the caches; so each tensor is read once from memory, and written once.

    turn k      put      piece k + 1 of the shares of others into our windows
                combine  piece k of our own share, from the windows of all
                take     piece k - 1 of the results of others

Nothing is written into memory that another rank may free: so a rank that fails, or has
gone on, spoils nothing for a rank that is behind.  Every sum is made in the order of
the ranks: so the result has the same bits everywhere, whatever the size.

The collectives of a group pass here one after the other, in the order of their numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple

import msgpack
import torch

from asyncrpc.core.serde.encoded import key_of
from asyncrpc.core.serde.shared import KEY_BYTES, seal, storage_over
from asyncrpc.errors import CollectiveError
from asyncrpc.parallel.collectives.board import BEGUN, PUBLISHED, Board
from asyncrpc.parallel.collectives.machine.operations import Mismatch
from asyncrpc.parallel.collectives.matching import CollectiveRun
from asyncrpc.parallel.collectives.message_path import MessagePath
from asyncrpc.parallel.collectives.messages import read_descriptor
from asyncrpc.parallel.collectives.reductions import Reduction
from asyncrpc.parallel.collectives.tensors import split
from asyncrpc.parallel.collectives.windows import Give, Take, Windows, copy_for

_ALIGN: Final = 64  # bytes, of what lies side by side in a slot
_POLL_S: Final = 0.1  # the longest sleep: a lost wake-up costs no more
_VIEWS_MAX: Final = 256  # tensors of different sizes, for which views are kept


class Part(NamedTuple):
    """A tensor that a rank has published.

    Attributes:
        at: its place in the rank's slot; -1: it comes through a window.
        dtype: its name, without `torch.`.
    """

    at: int
    nbytes: int
    dtype: str
    shape: list[int]

    def empty(self) -> torch.Tensor:
        """Return memory for it."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise CollectiveError(f"this rank has no dtype {self.dtype!r}")
        return torch.empty(self.shape, dtype=dtype, device="cpu")


class SharedPath:
    """The collectives of one group whose ranks are processes of one host."""

    def __init__(self, board: Board, rank: int) -> None:
        self._board = board
        self._rank = rank
        self._size = board.size
        self._all = range(board.size)
        self._others = [peer for peer in self._all if peer != rank]
        self._lane = asyncio.Lock()
        self._windows = Windows(board, rank)
        self._memory = GroupMemory()
        self._views: dict[tuple[torch.dtype, int], list[list[Any]]] = {}

    async def empty(self, run: CollectiveRun, nbytes: int) -> torch.Tensor:
        """Return memory of this rank that all ranks see: uint8, (nbytes,)."""
        mine = (
            torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            if nbytes == 0
            else None
        )
        if mine is None:
            mine = shared_bytes(nbytes, "asyncrpc-group")
        by_messages = MessagePath(self._rank, self._size)
        self._memory.add(await by_messages.all_gather(run, mine), self._rank)
        return mine

    # --- collectives -----------------------------------------------------------------

    async def barrier(self, run: CollectiveRun) -> None:
        """Wait for all ranks."""
        async with self._passing(run):
            await self._publish(run, b"")

    async def all_reduce(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction
    ) -> None:
        """Reduce a flat tensor in place, at all ranks."""
        async with self._passing(run):
            if flat.nbytes <= self._board.slot_bytes:
                await self._publish_in_slot(run, flat, by)
                self._reduce_slots(run, flat, by)
                return
            place = self._memory.place(flat)
            places = await self._publish(run, place)
            windows = self._windows
            if place and all(other == place for other in places):
                tensors = self._memory.at(place, flat)
                job = functools.partial(
                    windows.combine_in_place, run.number, by, tensors, run.check
                )
            # Half-precision values take five times as long to add as to copy: each
            # rank adds its share only, in place of both adding all.
            elif self._size == 2 and by.is_array:  # noqa: PLR2004
                job = functools.partial(
                    windows.exchange, run.number, by, flat, run.check
                )
            else:
                shares = split(flat, self._size)
                job = functools.partial(
                    windows.combine,
                    run.number,
                    by,
                    shares,
                    run.check,
                    result=shares[self._rank],
                    takers=self._all,
                )
            await self._in_thread(run, job)

    async def reduce(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction, root: int
    ) -> None:
        """Reduce a flat tensor in place at `root`; elsewhere it stays as it is."""
        is_root = self._rank == root
        async with self._passing(run):
            if flat.nbytes <= self._board.slot_bytes:
                await self._publish_in_slot(run, flat, by)
                if is_root:
                    self._reduce_slots(run, flat, by)
                return
            await self._publish(run, b"")
            shares = split(flat, self._size)
            mine = shares[self._rank]
            result = mine if is_root else torch.empty_like(mine)
            await self._combine(run, by, shares, result, [root])

    async def reduce_scatter(
        self, run: CollectiveRun, parts: list[torch.Tensor], by: Reduction
    ) -> torch.Tensor:
        """Return part `rank` of the flat parts, reduced over all ranks."""
        mine = parts[self._rank]
        result = torch.empty_like(mine)
        async with self._passing(run):
            published = await self._publish_parts(run, parts)
            if published[self._rank][self._rank].at < 0:
                await self._combine(run, by, parts, result, [])
                return result
            pieces = [
                by.piece(self._in_slot(run, rank, theirs[self._rank]).view(mine.dtype))
                for rank, theirs in enumerate(published)
            ]
            _combine(by, pieces, result)
            by.finish(result, self._size)
        return result

    async def broadcast(
        self, run: CollectiveRun, flat: torch.Tensor, root: int
    ) -> None:
        """Fill a flat tensor with that of `root`."""
        is_root = self._rank == root
        async with self._passing(run):
            published = await self._publish_parts(run, [flat] if is_root else [])
            if is_root:
                await self._move(run, [(0, flat, self._others)], [], published)
            else:
                await self._move(run, [], [(root, 0, flat)], published)

    async def all_gather(
        self, run: CollectiveRun, mine: torch.Tensor
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks, whose shapes may differ."""
        async with self._passing(run):
            published = await self._publish_parts(run, [mine])
            return await self._collect(run, published, [(0, mine, self._others)], 0)

    async def gather(
        self, run: CollectiveRun, mine: torch.Tensor, root: int
    ) -> list[torch.Tensor]:
        """Return the tensors of all ranks at `root`; elsewhere an empty list."""
        async with self._passing(run):
            published = await self._publish_parts(run, [mine])
            if self._rank == root:
                return await self._collect(run, published, [(0, mine, [])], 0)
            await self._move(run, [(0, mine, [root])], [], published)
        return []

    async def scatter(
        self, run: CollectiveRun, parts: list[torch.Tensor] | None, root: int
    ) -> torch.Tensor:
        """Return this rank's part of the tensors that `root` gives."""
        async with self._passing(run):
            published = await self._publish_parts(run, parts or [])
            if parts is not None:
                gives = [(peer, parts[peer], [peer]) for peer in self._others]
                await self._move(run, gives, [], published)
                return parts[self._rank]
            result = published[root][self._rank].empty()
            await self._move(run, [], [(root, self._rank, result)], published)
        return result

    async def all_to_all(
        self, run: CollectiveRun, parts: list[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return the part for this rank of every rank."""
        async with self._passing(run):
            published = await self._publish_parts(run, parts)
            gives: list[_Giving] = [
                (peer, parts[peer], [peer] if peer != self._rank else [])
                for peer in self._all
            ]
            return await self._collect(run, published, gives, self._rank)

    async def _collect(
        self,
        run: CollectiveRun,
        published: list[list[Part]],
        gives: Sequence[_Giving],
        index: int,
    ) -> list[torch.Tensor]:
        """Return the published tensor number `index` of every rank."""
        mine = next(tensor for lane, tensor, _ in gives if lane == index)
        got = [
            mine if rank == self._rank else published[rank][index].empty()
            for rank in self._all
        ]
        takes = [(rank, index, got[rank]) for rank in self._others]
        await self._move(run, gives, takes, published)
        return got

    # --- small tensors ---------------------------------------------------------------

    def _reduce_slots(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction
    ) -> None:
        """Reduce the tensors in all slots into `flat`."""
        _combine(by, self._slots_like(flat, by)[run.number % 2], flat)
        by.finish(flat, self._size)

    def _slots_like(self, flat: torch.Tensor, by: Reduction) -> list[list[Any]]:
        """Return all slots as pieces like a flat tensor, by turn and rank."""
        key = (flat.dtype, flat.numel())
        views = self._views.get(key)
        if views is None:  # making them takes longer than adding
            if len(self._views) >= _VIEWS_MAX:
                self._views.clear()
            views = self._views[key] = [
                [
                    by.piece(
                        self._board.slot(turn, rank)[: flat.nbytes].view(flat.dtype)
                    )
                    for rank in self._all
                ]
                for turn in range(2)
            ]
        return views

    def _in_slot(self, run: CollectiveRun, rank: int, part: Part) -> torch.Tensor:
        slot = self._board.slot(run.number, rank)
        return slot[part.at : part.at + part.nbytes]

    # --- large tensors ---------------------------------------------------------------

    async def _combine(
        self,
        run: CollectiveRun,
        by: Reduction,
        shares: Sequence[torch.Tensor],
        result: torch.Tensor,
        takers: Sequence[int],
    ) -> None:
        """Reduce our share over all ranks; see `Windows.combine`."""
        job = functools.partial(
            self._windows.combine,
            run.number,
            by,
            shares,
            run.check,
            result=result,
            takers=takers,
        )
        await self._in_thread(run, job)

    async def _move(
        self,
        run: CollectiveRun,
        gives: Iterable[_Giving],
        takes: Iterable[tuple[int, int, torch.Tensor]],
        published: Sequence[Sequence[Part]],
    ) -> None:
        """Give and take tensors: those in slots at once, the others by windows."""
        window_gives, window_takes = [], []
        mine = published[self._rank]
        for lane, tensor, takers in gives:
            if takers and tensor.nbytes and mine[lane].at < 0:
                window_gives.append(Give(lane, tensor, takers))
        for rank, lane, target in takes:
            part = published[rank][lane]
            if part.nbytes != target.nbytes:
                raise run.refuse(
                    rank, f"sent {part.nbytes} bytes instead of {target.nbytes}"
                )
            if part.at < 0:
                window_takes.append(Take(rank, lane, target))
            else:
                _bytes_of(target).copy_(self._in_slot(run, rank, part))
        if window_gives or window_takes:
            job = functools.partial(
                self._windows.move, run.number, window_gives, window_takes, run.check
            )
            await self._in_thread(run, job)

    async def _in_thread(self, run: CollectiveRun, job: Callable[[], None]) -> None:
        """Run `job` in a thread; when this returns or raises, it has ended."""
        future = run.matching.worker.run_on_host(job)
        try:
            await asyncio.shield(future)  # the job checks whether the collective failed
        except asyncio.CancelledError:
            run.abandon("cancelled it")  # which ends the job
            while not future.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([future])
            if not future.cancelled():
                future.exception()
            raise
        given_up = self._board.failed(run.number)
        if given_up:  # what the rank has posted since does not count
            deed = "stopped sending because it gave the collective up"
            raise run.refuse(given_up[0], deed)

    # --- publishing ------------------------------------------------------------------

    async def _publish_in_slot(
        self, run: CollectiveRun, flat: torch.Tensor, by: Reduction
    ) -> None:
        slot = self._slots_like(flat, by)[run.number % 2][self._rank]
        copy_for(by)(slot, by.piece(flat))
        await self._publish(run, b"")

    async def _publish_parts(
        self, run: CollectiveRun, tensors: Sequence[torch.Tensor]
    ) -> list[list[Part]]:
        """Publish tensors; return those of all ranks."""
        fits = _span(tensors) <= self._board.slot_bytes
        slot = self._board.slot(run.number, self._rank)
        parts, end = [], 0
        for tensor in tensors:
            if fits:
                slot[end : end + tensor.nbytes].copy_(_bytes_of(tensor))
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = tuple(tensor.shape)
            parts.append((end if fits else -1, tensor.nbytes, dtype, shape))
            end += _span([tensor])
        bodies = await self._publish(run, msgpack.packb(parts))
        return [[Part(*part) for part in msgpack.unpackb(body)] for body in bodies]

    async def _publish(self, run: CollectiveRun, body: bytes) -> list[memoryview]:
        """Write our note, wait for all ranks, and return the bodies of all notes."""
        board, number, head = self._board, run.number, run.head
        text = len(head).to_bytes(2, "little") + head
        board.write_note(number, self._rank, text + body)
        self._post(run, PUBLISHED)
        await self._reach(run, number, PUBLISHED)
        bodies = []
        for rank in range(self._size):
            note = board.note(number, rank)
            if note[: len(text)] != text:
                self._disagree(run, rank, note)
            bodies.append(note[len(text) :])
        return bodies

    def _disagree(self, run: CollectiveRun, rank: int, note: memoryview) -> None:
        """Fail the collective because a rank is at another one."""
        end = 2 + int.from_bytes(note[:2], "little")
        number, *descriptor = msgpack.unpackb(note[2:end])
        if number == run.number:
            theirs, ours = read_descriptor(descriptor), run.operation.descriptor
            run.matching.on_mismatch(number, Mismatch(rank, theirs, ours))
            run.check()
        raise run.refuse(rank, f"has already moved on to collective {number}")

    # --- one collective after the other ----------------------------------------------

    @asynccontextmanager
    async def _passing(self, run: CollectiveRun) -> AsyncIterator[None]:
        """Let a collective pass when all collectives before it have passed."""
        async with self._lane:
            try:
                run.check()
                self._post(run, BEGUN)
                # After this the notes and slots of the last but one are not read again.
                await self._reach(run, run.number - 1, BEGUN)
                yield
            except BaseException:
                self._board.fail(run.number)
                raise

    def _post(self, run: CollectiveRun, stage: int) -> None:
        for rank in self._board.post(run.number, stage):
            run.matching.wake(rank)

    async def _reach(self, run: CollectiveRun, number: int, stage: int) -> None:
        """Wait until every rank has come to a stage."""
        board = self._board
        if number < 0 or board.look(number, stage):
            return
        board.fall_asleep(number, stage)
        try:
            while not board.is_reached(number, stage):
                await run.pause(_POLL_S)
        except CollectiveError:
            # A rank that has ended it may have left, before we saw how far it had come.
            if not board.is_reached(number, stage):
                raise
        finally:
            board.wake_up()


class GroupMemory:
    """The memory of a group that every rank sees, allocated by `Group.empty`."""

    def __init__(self) -> None:
        self._all: list[list[torch.Tensor]] = []
        self._mine: list[tuple[int, int]] = []  # address and length

    def add(self, tensors: list[torch.Tensor], rank: int) -> None:
        """Add memory that the ranks have allocated together, by rank.

        Where a tensor came as a copy, no place is in this memory: then all ranks reduce
        by the windows.
        """
        mine = tensors[rank]
        is_shared = all(
            key_of(tensor.untyped_storage()) is not None for tensor in tensors
        )
        self._all.append(tensors)
        self._mine.append((mine.data_ptr(), mine.nbytes) if is_shared else (0, 0))

    def place(self, flat: torch.Tensor) -> bytes:
        """Return where in this memory a tensor is; empty if it is elsewhere."""
        address = flat.data_ptr()
        for serial, (start, nbytes) in enumerate(self._mine):
            if start <= address and address + flat.nbytes <= start + nbytes:
                return serial.to_bytes(4, "little") + (address - start).to_bytes(
                    8, "little"
                )
        return b""

    def at(self, place: bytes, like: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors at a place, one of every rank."""
        serial = int.from_bytes(place[:4], "little")
        start = int.from_bytes(place[4:], "little")
        return [
            tensor[start : start + like.nbytes].view(like.dtype)
            for tensor in self._all[serial]
        ]


_Giving = tuple[int, torch.Tensor, Sequence[int]]  # lane, tensor, takers


def _combine(by: Reduction, pieces: Sequence[Any], result: torch.Tensor) -> None:
    out = by.piece(result)
    by.combine(pieces[0], pieces[1], out)
    for piece in pieces[2:]:
        by.combine(out, piece, out)


def shared_bytes(nbytes: int, name: str) -> torch.Tensor:
    """Return anonymous memory that other processes can map: uint8."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, nbytes)
        seal(descriptor)
        storage = storage_over(descriptor, os.urandom(KEY_BYTES), nbytes)
    finally:
        os.close(descriptor)
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def _span(tensors: Sequence[torch.Tensor]) -> int:
    """Return what tensors take of a slot, side by side."""
    return sum(-(-tensor.nbytes // _ALIGN) * _ALIGN for tensor in tensors)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)
