"""torch's process group over a `Group`.

Its functions begin a collective on the loop, and return at once; torch waits for the
objects that they return, or gives them to the program.  Calls from torch's C++ code
(DDP, functional collectives) reach the same functions, under the same names.

Source: torch/csrc/distributed/c10d/ProcessGroup.hpp and PyProcessGroup.hpp, versions
2.9 to 2.14: the functions that torch calls, and what they are given.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from asyncrpc.parallel.collectives.torch_backend.call_hooks import CallHooks, Hook
from asyncrpc.parallel.collectives.torch_backend.collective_ops import (
    CollectiveOps,
    Tensors,
)
from asyncrpc.parallel.collectives.torch_backend.rank_runtime import Doing, RankRuntime
from asyncrpc.parallel.collectives.torch_backend.staged import StagedTensors
from asyncrpc.parallel.collectives.torch_backend.work import CollectiveWork

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NAME: Final = "asyncrpc"

_CPU: Final = torch.device("cpu")
_NONE: Final = object()  # in place of torch's options: its defaults
_NO_LIMIT: Final = timedelta(0)  # of options, no limit of their own: it is below 0


# Torch's stubs allow more ways to call its functions than torch itself uses.
_Base: Any = dist.ProcessGroup
_C10D: Any = distributed_c10d

_FIELDS: Final = {"root": "rootRank", "op": "reduceOp", "timeout": "timeout"}


def _also_short(
    options: Any, *names: str
) -> Callable[[Callable[..., CollectiveWork | None]], Any]:
    """Decorate a collective: it takes all that torch's own process groups take.

    That is one tensor where there is a list of one, and what is in the options without
    these: `allreduce(tensor, op)`, `broadcast(tensor, root=1)`.

    Args:
        names: of those that are there, in their order; `timeout` is the last one.
    """

    def decorate(method: Callable[..., CollectiveWork | None]) -> Any:
        parameters = inspect.signature(method).parameters
        slots = [slot for slot in ("outs", "tensors") if slot in parameters]

        @wraps(method)
        def call(self: Any, *args: Any, **named: Any) -> CollectiveWork | None:
            is_long = args and type(args[0]) is list and type(args[-1]) is options
            if is_long and not named:
                return method(self, *args)  # as torch's own functions call it
            lists, rest = [*args[: len(slots)]], [*args[len(slots) :]]
            for slot in slots[len(lists) :]:
                lists += [named.pop(name) for name in [*named] if _slot(name) == slot]
            if len(lists) != len(slots):
                raise TypeError(f"{method.__name__} takes {' and '.join(slots)}")
            opts = named.pop("opts", None)
            if rest and (rest[0] is None or hasattr(rest[0], "timeout")):
                opts = rest.pop(0)
            opts = options() if opts is None else opts
            _choose(opts, (*names, "timeout"), rest, named)
            return method(self, *_listed(lists), opts)

        return call

    return decorate


def _slot(name: str) -> str:
    """Return which tensors torch gives a name: `outs` or `tensors`; else empty."""
    if name.startswith("output"):
        return "outs"
    return "tensors" if name.startswith(("input", "tensor")) else ""


def _listed(lists: Sequence[Any]) -> Sequence[Any]:
    """Return lists where one of them may be a tensor: with it, all are short."""
    if not any(isinstance(item, torch.Tensor) for item in lists):
        return lists
    return [[item] for item in lists]


def _choose(
    opts: Any, order: Sequence[str], positional: Sequence[Any], named: dict[str, Any]
) -> None:
    """Set what a call gives without torch's options in them."""
    if len(positional) > len(order) or not named.keys() <= {*order}:
        raise TypeError(
            f"a collective takes tensors and {type(opts).__name__}, or in their place "
            f"{', '.join(order)}; not {[*positional, *named]}"
        )
    for name, value in (*zip(order, positional, strict=False), *named.items()):
        if value is not None:
            setattr(opts, _FIELDS[name], value)


class AsyncRpcProcessGroup(_Base):  # type: ignore[misc]  # it is Any: see above
    """The process group that `init_process_group("asyncrpc")` and `new_group` make.

    Attributes:
        participant: the worker behind it, which the groups of a process share.
        group: of asyncrpc.

    Source: torch.distributed.ProcessGroup.
    """

    def __init__(
        self,
        participant: RankRuntime,
        ranks: Sequence[int],
        rank: int,
        *,
        store: Store,
        name: str,
        timeout: timedelta,
    ) -> None:
        """Make the process group; nothing is sent.

        Args:
            participant: the worker of this process.
            ranks: of the members, among the workers that have met.
            rank: of this process, among the members.
            store: where they have met; torch asks for it.
            name: torch's name of the group, unique, the same at all ranks.
            timeout: of each collective.
        """
        super().__init__(rank, len(ranks))
        self._store = store
        self.participant = participant
        members = [participant.names[number] for number in ranks]
        self.group = participant.open_group(members, name, timeout.total_seconds())
        self._filling = CollectiveOps(participant.worker, self.group)
        self._name = name
        self._description = "undefined"
        self._is_exclusive = participant.is_exclusive
        self._hooks = CallHooks(rank)
        self._has_hooks = bool(self._hooks.before)  # asked at each call
        self._coalesced: list[tuple[Tensors, Doing, StagedTensors]] | None = None

    # --- identity -------------------------------------------------------------------

    @property
    def addresses(self) -> tuple[str, ...]:
        """Return the addresses at which commands such as `asyncrpc why` find it."""
        return self.participant.worker.addresses

    @property
    def group_name(self) -> str:
        """Torch's name of the group."""
        return self._name

    def getGroupName(self) -> str:  # noqa: N802  (torch's name)
        """Return torch's name of the group."""
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    @property
    def group_desc(self) -> str:
        """Return the program's description of the group."""
        return self._description

    def getGroupDesc(self) -> str:  # noqa: N802  (torch's name)
        """Return the program's description of the group."""
        return self._description

    def _set_group_desc(self, description: str) -> None:
        self._description = description

    def name(self) -> str:
        """Return the backend's name."""
        return NAME

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        """Return the backend's name."""
        return NAME

    _get_backend_name = name

    # What torch asks of its own backends, which are behind a process group.
    supports_splitting = False
    supports_coalescing = False
    supports_time_estimate = False
    supports_reconfigure = False
    supports_window = False

    @property
    def _device_types(self) -> list[torch.device]:
        # Where torch puts tensors of its own, such as those of objects: all devices
        # are served, and this one has nothing to be staged.
        return [_CPU]

    def _get_backend(self, device: torch.device) -> AsyncRpcProcessGroup:
        return self

    def get_group_store(self) -> Store:
        """Return the store at which the ranks have met."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time limit of collectives that begin from now on."""
        self.group.timeout_s = timeout.total_seconds()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._name!r}, {self.group}>"

    # --- hooks -----------------------------------------------------------------------

    def register_pre_hook(self, hook_id: int, hook: Hook) -> None:
        """Call a hook before each operation begins."""
        self._hooks.before[hook_id] = hook
        self._has_hooks = True

    def unregister_pre_hook(self, hook_id: int) -> None:
        """Stop to call a hook before each operation."""
        self._hooks.before.pop(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Hook) -> None:
        """Call a hook after each operation has begun, with its work."""
        self._hooks.after[hook_id] = hook
        self._has_hooks = True

    def unregister_post_hook(self, hook_id: int) -> None:
        """Stop to call a hook after each operation."""
        self._hooks.after.pop(hook_id, None)

    # --- its end ---------------------------------------------------------------------

    def shutdown(self) -> None:
        """Leave the group when all work under way here has ended.  Idempotent.

        With the last process group the worker of this process ends.
        """
        self.participant.close_group(self.group, drain=True)

    def abort(self) -> None:
        """Leave the group at once: work under way fails on all ranks.  Idempotent."""
        self.participant.close_group(self.group, drain=False)

    # --- reductions ------------------------------------------------------------------

    @_also_short(_C10D.AllreduceOptions, "op")
    def allreduce(self, tensors: Tensors, opts: Any = _NONE) -> CollectiveWork | None:
        """Reduce a tensor in place, at all ranks."""
        self._check_one("all_reduce", tensors)
        return self.allreduce_coalesced(tensors, opts)

    def allreduce_coalesced(
        self, tensors: Tensors, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Reduce each of several tensors in place, at all ranks."""
        op, staged = _operation(opts), StagedTensors(self._is_exclusive)
        do = partial(self._filling.all_reduce, staged.changed(tensors), op)
        return self._begin("all_reduce", tensors, opts, do, staged)

    @_also_short(_C10D.ReduceOptions, "root", "op")
    def reduce(self, tensors: Tensors, opts: Any) -> CollectiveWork | None:
        """Reduce a tensor, in place at one rank."""
        self._check_one("reduce", tensors, opts.rootRank)
        root, op = opts.rootRank, opts.reduceOp
        staged = StagedTensors(self._is_exclusive)
        is_root = self.group.rank == root
        hosts = staged.changed(tensors) if is_root else staged.read(tensors)
        do = partial(self._filling.reduce, hosts, root, op)
        return self._begin("reduce", tensors, opts, do, staged)

    @_also_short(_C10D.ReduceScatterOptions, "op")
    def reduce_scatter(
        self, outs: Tensors, tensors: Sequence[Tensors], opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Leave this rank's part of the reduced tensors of each list in its `out`."""
        op, staged = _operation(opts), StagedTensors(self._is_exclusive)
        parts = [staged.read(rank_parts) for rank_parts in tensors]
        do = partial(self._filling.reduce_scatter, staged.filled(outs), parts, op)
        return self._begin("reduce_scatter", outs, opts, do, staged)

    def reduce_scatter_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Do the same with one tensor that is cut in equal parts."""
        return self.reduce_scatter_single_coalesced([out], [tensor], opts)

    def reduce_scatter_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Do that with several tensors."""
        op, staged = _operation(opts), StagedTensors(self._is_exclusive)
        inputs, hosts = staged.read(tensors), staged.filled(outs)
        do = partial(self._filling.reduce_scatter_flat, hosts, inputs, op)
        return self._begin("reduce_scatter_tensor", outs, opts, do, staged)

    # --- moves -----------------------------------------------------------------------

    @_also_short(_C10D.BroadcastOptions, "root")
    def broadcast(self, tensors: Tensors, opts: Any = _NONE) -> CollectiveWork | None:
        """Fill a tensor with that of one rank."""
        self._check_one("broadcast", tensors, opts.rootRank)
        root, staged = opts.rootRank, StagedTensors(self._is_exclusive)
        is_root = self.group.rank == root
        hosts = staged.read(tensors) if is_root else staged.filled(tensors)
        do = partial(self._filling.broadcast, hosts, root)
        return self._begin("broadcast", tensors, opts, do, staged)

    @_also_short(_C10D.AllgatherOptions)
    def allgather(
        self, outs: Sequence[Tensors], tensors: Tensors, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Fill a list with the tensors of all ranks."""
        self._check_one("all_gather", tensors)
        return self._all_gather(outs, tensors, opts)

    def _all_gather(
        self, outs: Sequence[Tensors], tensors: Tensors, opts: Any
    ) -> CollectiveWork | None:
        staged = StagedTensors(self._is_exclusive)
        inputs, hosts = staged.read(tensors), [staged.filled(out) for out in outs]
        do = partial(self._filling.all_gather, hosts, inputs)
        return self._begin("all_gather", _flat(outs), opts, do, staged)

    def allgather_coalesced(
        self, outs: Sequence[Tensors], tensors: Tensors, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Do the same where there is one list for each rank."""
        by_tensor = [[its[n] for its in outs] for n in range(len(tensors))]
        return self._all_gather(by_tensor, tensors, opts)

    def all_gather_single(
        self, out: torch.Tensor, tensor: torch.Tensor, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Fill one tensor with those of all ranks, one after the other."""
        return self.all_gather_single_coalesced([out], [tensor], opts)

    def all_gather_single_coalesced(
        self, outs: Tensors, tensors: Tensors, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Do that with several tensors."""
        staged = StagedTensors(self._is_exclusive)
        inputs, hosts = staged.read(tensors), staged.filled(outs)
        do = partial(self._filling.all_gather_flat, hosts, inputs)
        return self._begin("all_gather_into_tensor", outs, opts, do, staged)

    @_also_short(_C10D.GatherOptions, "root")
    def gather(
        self, outs: Sequence[Tensors], tensors: Tensors, opts: Any
    ) -> CollectiveWork | None:
        """Fill a list at one rank with the tensors of all."""
        self._check_one("gather", tensors, opts.rootRank)
        staged, filled = StagedTensors(self._is_exclusive), _flat(outs)
        (tensor,), hosts = staged.read(tensors[:1]), staged.filled(filled)
        do = partial(self._filling.gather, hosts, tensor, opts.rootRank)
        return self._begin("gather", filled, opts, do, staged)

    @_also_short(_C10D.ScatterOptions, "root")
    def scatter(
        self, outs: Tensors, tensors: Sequence[Tensors], opts: Any
    ) -> CollectiveWork | None:
        """Fill a tensor with this rank's part of what one rank gives."""
        self._check_one("scatter", outs, opts.rootRank)
        staged = StagedTensors(self._is_exclusive)
        parts = staged.read(tensors[0]) if tensors and tensors[0] else None
        (out,) = staged.filled(outs[:1])
        do = partial(self._filling.scatter, out, parts, opts.rootRank)
        return self._begin("scatter", outs, opts, do, staged)

    @_also_short(_C10D.AllToAllOptions)
    def alltoall(
        self, outs: Tensors, tensors: Tensors, opts: Any = _NONE
    ) -> CollectiveWork | None:
        """Send each rank its tensor, and take one from each."""
        staged = StagedTensors(self._is_exclusive)
        inputs, hosts = staged.read(tensors), staged.filled(outs)
        do = partial(self._filling.all_to_all, hosts, inputs)
        return self._begin("all_to_all", outs, opts, do, staged)

    def all_to_all_single(
        self,
        out: torch.Tensor,
        tensor: torch.Tensor,
        out_rows: Sequence[int] = (),
        rows: Sequence[int] = (),
        opts: Any = _NONE,
    ) -> CollectiveWork | None:
        """Do the same with two tensors that are cut along their first dimension."""
        staged = StagedTensors(self._is_exclusive)
        (source,), (host,) = staged.read([tensor]), staged.filled([out])
        do = partial(self._filling.all_to_all_flat, host, source, out_rows, rows)
        return self._begin("all_to_all_single", [out], opts, do, staged)

    def barrier(self, opts: Any = _NONE) -> CollectiveWork | None:
        """Wait for all ranks."""
        return self._begin("barrier", (), opts, self._filling.barrier, StagedTensors())

    def monitored_barrier(
        self,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002  (torch's signature)
    ) -> None:
        """Wait for all ranks; like every barrier here, it names missing ranks."""
        opts = dist.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        work = self.barrier(opts)
        if work is not None:
            work.wait()

    # Their names until version 2.12, which torch still uses for a while.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # --- from one to one -------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> CollectiveWork | None:
        """Send tensors to a rank."""
        staged = StagedTensors(self._is_exclusive)
        do = partial(self._filling.send, staged.read(tensors), to, tag)
        return self._begin("send", tensors, _NONE, do, staged)

    def recv(self, tensors: Tensors, from_: int, tag: int) -> CollectiveWork | None:
        """Fill tensors with those from a rank."""
        staged = StagedTensors(self._is_exclusive)
        do = partial(self._filling.recv, staged.filled(tensors), from_, tag)
        return self._begin("recv", tensors, _NONE, do, staged)

    def recv_anysource(self, tensors: Tensors, tag: int) -> CollectiveWork | None:
        """Fill tensors with those from any rank."""
        staged = StagedTensors(self._is_exclusive)
        do = partial(self._filling.recv, staged.filled(tensors), None, tag)
        return self._begin("recv", tensors, _NONE, do, staged)

    # --- several as one --------------------------------------------------------------

    def _start_coalescing(self, device: torch.device) -> None:
        """Delay operations from now on until `_end_coalescing`."""
        if self._coalesced is not None:
            raise RuntimeError("this process group is already coalescing")
        self._coalesced = []

    def _end_coalescing(self, device: torch.device) -> CollectiveWork | None:
        """Begin all coalesced operations; return one work for all of them."""
        asked, self._coalesced = self._coalesced or [], None
        tensors = [tensor for its, _, _ in asked for tensor in its]
        staged = StagedTensors()
        for _, _, its in asked:
            staged.add(its)
        do = partial(self._filling.all_of, [doing for _, doing, _ in asked])
        return self._begin("coalesced", tensors, _NONE, do, staged)

    def _check_one(self, operation: str, tensors: Tensors, root: int = 0) -> None:
        if len(tensors) != 1:
            raise ValueError(
                f"{operation} takes one tensor of each rank, not {len(tensors)}; "
                "several go in torch's *_coalesced functions"
            )
        if not 0 <= root < self.group.size:
            raise ValueError(
                f"{operation} has root {root}; the ranks are 0 to {self.group.size - 1}"
            )

    def _begin(
        self,
        operation: str,
        tensors: Tensors,
        opts: Any,
        doing: Doing,
        staged: StagedTensors,
    ) -> CollectiveWork | None:
        """Begin an operation; return None if coalescing delays it."""
        call_after = None
        # The hooks have seen the operations of a coalesced one.
        if self._has_hooks and operation != "coalesced":
            call_after = self._hooks.call_before(operation, tensors, opts, doing)
        limit: timedelta | None = getattr(opts, "timeout", None)
        if limit is not None and limit > _NO_LIMIT:
            limit_s = limit.total_seconds()
            doing = partial(self._filling.within, limit_s, doing)
        if self._coalesced is not None:
            self._coalesced.append((tensors, doing, staged))
            work = None
        else:
            work = CollectiveWork(operation, list(tensors), self.participant, staged)
            self.participant.submit(self.group, work, doing)
        if call_after is not None:
            call_after(work)
        return work


def _operation(opts: Any) -> Any:
    """Return the reduction in torch's options; those of C++ code may have none."""
    return dist.ReduceOp.SUM if opts is _NONE else opts.reduceOp


def _flat(lists: Sequence[Tensors]) -> list[torch.Tensor]:
    return [tensor for its in lists for tensor in its]
