"""`Group`: the ranks of a collective, and the collectives, as coroutines."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, Final, Self, cast
from weakref import WeakKeyDictionary

import torch

from asyncrpc import extend
from asyncrpc.core.arguments import check_kind
from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.core.worker import Worker
from asyncrpc.errors import CollectiveError, UsageError
from asyncrpc.parallel.collectives import argument_checks
from asyncrpc.parallel.collectives import tensors as shapes
from asyncrpc.parallel.collectives.machine.operations import Descriptor
from asyncrpc.parallel.collectives.matching import CollectiveRun, Matching, group_label
from asyncrpc.parallel.collectives.path import Path
from asyncrpc.parallel.collectives.reductions import reduction_for
from asyncrpc.parallel.collectives.runs import CollectiveRuns
from asyncrpc.parallel.collectives.service import CollectivesService
from asyncrpc.parallel.collectives.tensors import Hosted, RankTensors

TIMEOUT_S: Final = 1800.0  # as torch.distributed's


def group_over(
    worker: Worker, name: str, timeout_s: float | None, matching: Matching
) -> Group:
    """Return the group whose collectives `matching` runs."""
    group = Group.__new__(Group)
    group._begin(worker, name, timeout_s, matching)  # noqa: SLF001
    return group


class Group:
    """Workers that take part in collectives, each with a rank.

    Every member makes the group, with the same name and the same members in the same
    order, and begins the same collectives in the same order; several may run at once.
    A collective fails if a rank calls it with another shape, dtype or operation, gives
    it up, or is late.  It then fails on every rank that has not ended it; the next one
    can be used.  A lost worker ends the group: make a new one of the remaining workers.

    Raises:
        CollectiveError: a collective failed on all ranks, as above.
        UsageError: an argument is wrong; nothing has begun here.

    Cancellation:
        A cancelled collective fails on all ranks; the next one can be used.

    Attributes:
        worker: as given.
        name: as given.
        members: names of the workers, by rank.
        rank: of this worker in the group.
        size: number of ranks.
        timeout_s: seconds that a collective may take; None: no limit.
        kept: memory of `empty`, by purpose, as long as the group is open.

    Example:
        >>> group = asyncrpc.Group(worker)  # of all workers of a fixed group
        >>> await group.all_reduce(gradient, "avg")

    Source: torch.distributed.ProcessGroup.
    """

    def __init__(
        self,
        worker: Worker,
        members: Sequence[str | int] | None = None,
        *,
        name: str = "",
        timeout_s: float | None = TIMEOUT_S,
    ) -> None:
        """Make the group here; nothing is sent.

        Args:
            worker: the worker of this process; it must be running.
            members: names or ranks of the workers; None: all of the worker's own group,
                by rank, which must be of a fixed size.
            name: tells groups of the same members apart.
            timeout_s: seconds that a collective may take; None: no limit.

        Raises:
            UsageError: `worker` is not a member, a member is named twice, the group is
                open already, this is not the worker's loop, or an argument is wrong.
            UnknownWorkerError: no worker has a given name or rank.
            NotStartedError: `worker` is not running.
        """
        argument_checks.check_group(worker, name, timeout_s)
        names = argument_checks.names_of(worker, members)
        self._begin(
            worker,
            name,
            timeout_s,
            extend.service_of(worker, CollectivesService).open(name, names),
        )

    def _begin(
        self, worker: Worker, name: str, timeout_s: float | None, matching: Matching
    ) -> None:
        self.worker = worker
        self.host = extend.host_of(worker)
        self.name = name
        self.timeout_s = timeout_s
        self._service = extend.service_of(worker, CollectivesService)
        self._matching = matching
        self.members = tuple(matching.members)
        self.rank = matching.rank
        self.size = len(self.members)
        self._runs = CollectiveRuns(self.host, matching)
        self._points = matching.points
        self._duplicates = 0
        self.kept: WeakKeyDictionary[object, Any] = WeakKeyDictionary()

    @property
    def path(self) -> str:
        """Internal: the names of its parent groups and its own, joined by slashes."""
        return self._matching.path

    def subgroup(self, ranks: Sequence[int], *, name: str = "") -> Group:
        """Make a group of some of these ranks; only those ranks call this.

        Args:
            ranks: in this group; their order is that of the new one.
            name: tells groups of the same members apart.

        Raises:
            UsageError: this worker is not among `ranks`, a rank is out of range, or an
                argument has the wrong type.
        """
        check_kind("name", name, str, "a string")
        argument_checks.check_ranks(ranks, self.rank, self.size)
        path = f"{self._matching.path}/{name}"
        members = [self.members[rank] for rank in ranks]
        return Group(self.worker, members, name=path, timeout_s=self.timeout_s)

    def duplicate(self, *, name: str = "") -> Group:
        """Make a group of the same ranks, whose collectives are matched by themselves.

        A library can then run its collectives without interfering with yours.  Every
        rank must make its duplicates in the same order, or name them.

        Args:
            name: tells it apart from other groups of the same members; empty: it gets
                a number.

        Raises:
            UsageError: a group of this name is open, or `name` is not a string.

        Source: MPI_Comm_dup.
        """
        check_kind("name", name, str, "a string")
        if not name:
            self._duplicates += 1
            name = f"#{self._duplicates}"
        return self.subgroup(range(self.size), name=name)

    def refuse(self, reason: str) -> None:
        """Fail the next collective on all ranks: this rank cannot take part.

        Args:
            reason: what happened, as in "rank 1 ('b') `reason`".

        Raises:
            CollectiveError: the group has failed before.
            UsageError: `reason` is not a string; or this is not the worker's event
                loop.
        """
        check_kind("reason", reason, str, "a string")
        self.host.check_on_loop("Group.refuse")
        self._runs.start_opening()
        self._matching.refuse(argument_checks.speakable(reason))

    def close(self) -> None:
        """Leave the group; collectives under way here fail on all ranks.  Idempotent.

        Raises:
            UsageError: the worker runs, and this is not its event loop.
        """
        if not self.worker.is_closed:  # its end has closed all groups
            self.host.check_on_loop("Group.close")
            self._service.close_group(self._matching)
        self._runs.opening = None  # its result holds all shared memory
        self.kept.clear()

    async def __aenter__(self) -> Self:
        """Return the group, which is open already.

        Raises:
            UsageError: the worker has ended, or this is not its event loop.
        """
        self.host.check_on_loop("Group")
        return self

    @extend.does(lambda at: group_label(at["self"].path))  # in its `async with`
    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Close the group."""
        self.close()

    def __repr__(self) -> str:
        return f"<Group {self.name!r}, rank {self.rank} of {self.size}>"

    @plain_steps
    async def empty(
        self, *shape: int | Sequence[int], dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Return a tensor in memory where collectives are fastest; a collective itself.

        Between processes of one host, all ranks see the memory: `all_reduce` of such a
        tensor, or of the same part of it at every rank, copies nothing.  Elsewhere it
        is an ordinary tensor.  If a collective fails, its content is undefined, and
        another rank may still write to it for a moment: do not use it again.

        Args:
            *shape: sizes, or one sequence of them; the same at all ranks.
            dtype: of the elements.

        Returns:
            An uninitialized tensor, contiguous, on the CPU.  Its memory is freed some
            seconds after the group is closed and the last tensor over it is gone.

        Source: torch.empty.
        """
        sizes = shape[0] if shape and not isinstance(shape[0], int) else shape
        nbytes = argument_checks.bytes_of(sizes, dtype)
        async with self._run(Descriptor("empty", shape=(nbytes,))) as (run, path):
            memory = await path.empty(run, nbytes)
        return memory.view(dtype).view(cast("Sequence[int]", sizes))

    # --- collectives -----------------------------------------------------------------

    @plain_steps
    async def barrier(self) -> None:
        """Wait until every rank has reached the barrier."""
        async with self._run(Descriptor("barrier")) as (run, path):
            await path.barrier(run)

    @plain_steps
    async def all_reduce(self, tensor: torch.Tensor, op: str = "sum") -> torch.Tensor:
        """Combine the tensors of all ranks, and leave the result at every rank.

        Args:
            tensor: any shape, the same at all ranks, dense, on any device; it is
                overwritten.
            op: `sum`, `avg`, `product`, `min`, `max`, `band`, `bor` or `bxor`.

        Returns:
            `tensor`, with the same bits at every rank.
        """
        shapes.check(tensor, is_written=True)
        by = reduction_for(op, tensor.dtype)
        async with (
            self._run(shapes.described("all_reduce", tensor, op)) as (run, path),
            Hosted(self.host.devices, tensor) as host,
        ):
            with shapes.flat(host) as flat:
                await path.all_reduce(run, flat, by)
        return tensor

    @plain_steps
    async def reduce(
        self, tensor: torch.Tensor, root: int, op: str = "sum"
    ) -> torch.Tensor:
        """Combine the tensors of all ranks, and leave the result at one.

        Args:
            tensor: any shape, the same at all ranks; at `root` it is overwritten.
            root: the rank that gets the result.
            op: as for `all_reduce`.

        Returns:
            `tensor`, which is unchanged at all ranks but `root`.
        """
        argument_checks.check_rank(root, "root", self.size)
        write = self.rank == root
        shapes.check(tensor, is_written=write)
        by = reduction_for(op, tensor.dtype)
        async with (
            self._run(shapes.described("reduce", tensor, op, root)) as (run, path),
            Hosted(self.host.devices, tensor, write=write) as host,
        ):
            with shapes.flat(host, write=write) as flat:
                await path.reduce(run, flat, by, root)
        return tensor

    @plain_steps
    async def broadcast(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Fill the tensors of all ranks with that of one.

        Args:
            tensor: any shape and dtype, the same at all ranks; it is overwritten at all
                ranks but `root`.
            root: the rank whose tensor it is.

        Returns:
            `tensor`.
        """
        argument_checks.check_rank(root, "root", self.size)
        write = self.rank != root
        shapes.check(tensor, is_written=write)
        async with (
            self._run(shapes.described("broadcast", tensor, "", root)) as (run, path),
            Hosted(self.host.devices, tensor, write=write) as host,
        ):
            with shapes.flat(host, write=write) as flat:
                await path.broadcast(run, flat, root)
        return tensor

    @plain_steps
    async def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, at every rank.

        Args:
            tensor: any shape, which may differ between ranks, of the same dtype.

        Returns:
            One tensor for each rank; this rank's own is a copy.
        """
        shapes.check(tensor)
        descriptor = Descriptor("all_gather", dtype=str(tensor.dtype))
        async with self._run(descriptor) as (run, path):
            (mine,) = await self._copies([tensor])
            gathered = await path.all_gather(run, mine)
        return await shapes.put_like(self.host.devices, gathered, tensor)

    @plain_steps
    async def gather(
        self, tensor: torch.Tensor, root: int
    ) -> list[torch.Tensor] | None:
        """Return the tensors of all ranks, at one of them.

        Args:
            tensor: any shape, which may differ between ranks, of the same dtype.
            root: the rank that gets them.

        Returns:
            At `root` one tensor for each rank, its own a copy; elsewhere None.
        """
        argument_checks.check_rank(root, "root", self.size)
        shapes.check(tensor)
        descriptor = Descriptor("gather", dtype=str(tensor.dtype), root=root)
        async with self._run(descriptor) as (run, path):
            (mine,) = await self._copies([tensor])
            gathered = await path.gather(run, mine, root)
        if self.rank != root:
            return None
        return await shapes.put_like(self.host.devices, gathered, tensor)

    @plain_steps
    async def scatter(
        self,
        tensors: Sequence[torch.Tensor] | None,
        root: int,
        *,
        device: str | None = None,
    ) -> torch.Tensor:
        """Return this rank's part of what one rank gives.

        Args:
            tensors: at `root` one for each rank, of any shapes and dtypes; elsewhere
                None.
            root: the rank that gives them.
            device: for the result; None: host memory.

        Returns:
            A new tensor.
        """
        argument_checks.check_rank(root, "root", self.size)
        if device is not None:
            await argument_checks.check_device(self.host, device)
        whole = None
        if self.rank == root:
            whole = shapes.one_each(tensors, "scatter", self.size)
        elif tensors is not None:
            raise UsageError(
                f"tensors must be None except at the root, rank {root}; this is rank "
                f"{self.rank}"
            )
        async with self._run(Descriptor("scatter", root=root)) as (run, path):
            parts = None if whole is None else await self._copies(whole)
            part = await path.scatter(run, parts, root)
        if device is None:
            return part
        return (await self.host.devices.placed({0: (part, device)}))[0]

    @plain_steps
    async def reduce_scatter(
        self, tensors: torch.Tensor | Sequence[torch.Tensor], op: str = "sum"
    ) -> torch.Tensor:
        """Combine the tensors of all ranks, and leave a part of the result at each.

        Args:
            tensors: one for each rank, the same shapes at all ranks; or one tensor,
                whose first dimension is divisible by the number of ranks.
            op: as for `all_reduce`.

        Returns:
            The part of this rank, a new tensor.
        """
        parts = RankTensors(tensors, "reduce_scatter", self.size)
        devices, dtype = self.host.devices, parts.like.dtype
        by = reduction_for(op, dtype)
        if len(parts.dtypes) > 1:
            raise UsageError("tensors of reduce_scatter must have one dtype")
        descriptor = Descriptor("reduce_scatter", op, str(dtype), parts.numels)
        async with self._run(descriptor) as (run, path):
            hosts = await parts.on_host(devices)
            flats = [shapes.packed(part).view(-1) for part in hosts]
            flat = await path.reduce_scatter(run, flats, by)
        shaped = flat.view(parts.shapes[self.rank])
        return (await shapes.put_like(devices, [shaped], parts.like))[0]

    @plain_steps
    async def all_to_all(
        self, tensors: torch.Tensor | Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Send each rank its part, and return the parts for this rank.

        Args:
            tensors: one for each rank, of any shapes, of one dtype at all ranks; or one
                tensor, whose first dimension is divisible by the number of ranks.

        Returns:
            One tensor of each rank.
        """
        devices, parts = (
            self.host.devices,
            RankTensors(tensors, "all_to_all", self.size),
        )
        descriptor = Descriptor("all_to_all", dtype=str(parts.like.dtype))
        async with self._run(descriptor) as (run, path):
            mine = [shapes.copy(tensor) for tensor in await parts.on_host(devices)]
            received = await path.all_to_all(run, mine)
        return await shapes.put_like(devices, received, parts.like)

    # --- from one to one -------------------------------------------------------------

    @plain_steps
    async def send(self, tensor: torch.Tensor, to: int, *, tag: int = 0) -> None:
        """Send a tensor to another rank, which must `recv` it.

        This returns when the tensor has been received; it may be changed then.

        Args:
            tensor: any shape and dtype.
            to: rank of the receiver.
            tag: tells apart tensors that are sent between the same ranks.

        Raises:
            RankLostError: the other rank is gone.
            CollectiveTimeoutError: the other rank did not receive the tensor in time.
            UsageError: an argument is wrong; nothing has been sent.

        Cancellation:
            A tensor that has not been received yet never is.
        """
        argument_checks.check_rank(to, "to", self.size)
        argument_checks.check_tag(tag)
        shapes.check(tensor)
        self.host.check_on_loop("Group.send")
        (host,) = await self.host.devices.copies_of([tensor])
        await self._points.send(host.detach(), to, tag, self.timeout_s)

    @plain_steps
    async def recv(
        self,
        from_: int | None = None,
        *,
        tag: int = 0,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return a tensor that another rank sends.

        Args:
            from_: rank of the sender; None: any.
            tag: the tag that the sender gave.
            out: a tensor of the same shape and dtype, which is filled and returned;
                None: a new tensor is returned.

        Raises:
            RankLostError: a rank that the tensor may come from is gone.
            CollectiveTimeoutError: nothing was sent in time.
            CollectiveError: `out` has another shape or dtype than the tensor.
            UsageError: an argument is wrong.

        Cancellation:
            The next receive gets the tensor.
        """
        if from_ is not None:
            argument_checks.check_rank(from_, "from_", self.size)
        argument_checks.check_tag(tag)
        if out is not None:
            shapes.check(out, "out", is_written=True)
        self.host.check_on_loop("Group.recv")
        received = await self._points.recv(from_, tag, self.timeout_s)
        if out is None:
            return received
        if out.shape != received.shape or out.dtype != received.dtype:
            raise CollectiveError(
                f"the received tensor is {shapes.text(received)}, but `out` is "
                f"{shapes.text(out)}"
            )
        if out.is_cpu:
            out.detach().copy_(received)
        else:
            await self.host.devices.write(out, received)
        return out

    # --- parts -----------------------------------------------------------------------

    async def _copies(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies in contiguous host memory that nothing else refers to."""
        hosts = await self.host.devices.copies_of(tensors)
        return [
            shapes.copy(tensor) if tensor.is_cpu else shapes.packed(host)
            for tensor, host in zip(tensors, hosts, strict=True)
        ]

    def _run(
        self, descriptor: Descriptor
    ) -> AbstractAsyncContextManager[tuple[CollectiveRun, Path]]:
        """Run one collective; see `CollectiveRuns.run`."""
        return self._runs.run(descriptor, self.timeout_s)
