"""For native steps: all gradients reduced at once, after a backward pass.

`asyncrpc.ddp` reduces them while autograd runs, bucket by bucket; here nothing wraps
the module, and the ranks agree on nothing before the step.  So each step first compares
which parameters have a gradient: else ranks could add up gradients of different ones.

Source: torch_xla.core.xla_model.reduce_gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

import torch

from asyncrpc.core.arguments import check_kind
from asyncrpc.core.devices.staging import Devices
from asyncrpc.core.loop.threads import ThreadPool
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.flat import gather, scatter
from asyncrpc.parallel.ddp.threads import run_beside, user_of

_SPARSE: Final = 1 << 32  # a mark that no number of ranks reaches
_Memories: TypeAlias = dict[torch.dtype, torch.Tensor]  # of all gradients of a dtype


async def reduce_gradients(optimizer: torch.optim.Optimizer, group: Group) -> None:
    """Give the gradients of an optimizer their mean over all ranks, all at once.

    Call it between backward pass and step, at every rank.  The host adds up: all
    gradients are fetched under one lock of their device, so that one graph computes
    them, and put back under another.  A parameter without a gradient at any rank is
    left alone.  Between, the gradients are in memory that the ranks of a host share,
    which the group keeps for the next step of the same optimizer.

    Args:
        optimizer: of parameters on any device, the same at every rank.
        group: the ranks.

    Raises:
        UsageError: an argument has the wrong type.  Or no parameter has a gradient, a
            parameter has one at some ranks only, or a gradient is sparse: every rank
            raises it.  Or the worker of `group` was not told of the device: the others
            get a CollectiveError.  The gradients are unchanged.
        CollectiveError: a rank failed or was lost; all ranks fail, and the gradients
            are unchanged.

    Cancellation:
        The call fails on all ranks.  The gradients are unchanged, or all are the mean:
        copying them back is completed first.

    Example:
        >>> loss = await asyncrpc.devices.run(forward_and_backward)
        >>> await xla.reduce_gradients(optimizer, group)
        >>> await asyncrpc.devices.run(optimizer.step)

    Source: torch_xla.core.xla_model.reduce_gradients, which lets the device reduce, in
    the graph of the step, and assumes that all ranks have the same gradients.  Here
    they are divided before they are added up, as in `asyncrpc.ddp`, not after.
    """
    check_kind("optimizer", optimizer, torch.optim.Optimizer, "a torch.optim.Optimizer")
    check_kind("group", group, Group, "a Group")
    parameters = [
        parameter for those in optimizer.param_groups for parameter in those["params"]
    ]
    memories = await _agree(optimizer, parameters, group)
    if group.size == 1:
        return
    flats = [
        _Flat(some, memories[dtype], 1 / group.size)
        for dtype, some in _by_dtype(parameters).items()
    ]
    gradients = [gradient for flat in flats for gradient in flat.gradients]
    worker, nbytes = group.host, sum(gradient.nbytes for gradient in gradients)
    user = user_of(worker, gradients)

    def fetch() -> None:
        if user is not None:
            _make_ready(worker.devices, worker.pool, gradients)
        for flat in flats:
            flat.fetch()

    def put_back() -> None:
        for flat in flats:
            flat.put_back()

    try:
        await run_beside(fetch, nbytes, user)
    except UsageError as error:
        group.refuse(f"cannot reduce its gradients: {error}")
        raise
    for flat in flats:
        await group.all_reduce(flat.memory)
    await run_beside(put_back, nbytes, user)
    # Not if a collective has failed: another rank may still write to it.
    group.kept[optimizer] = memories


async def _agree(
    optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor], group: Group
) -> _Memories:
    """Check that the ranks reduce the same gradients; return memory for them."""
    kept: _Memories = group.kept.get(optimizer, {})
    sizes = _sizes(parameters)
    has_room = all(
        dtype in kept and kept[dtype].numel() >= numel for dtype, numel in sizes.items()
    )
    marks = [_mark(parameter.grad) for parameter in parameters]
    sums = torch.tensor([*marks, has_room], dtype=torch.int64, device="cpu")
    if group.size > 1:
        await group.all_reduce(sums)
    *counts, having = sums.tolist()
    _check(parameters, counts, group.size)
    group.kept.pop(optimizer, None)
    if group.size == 1 or having >= group.size:
        return kept
    return {  # new for all: a rank has none
        dtype: await group.empty(numel, dtype=dtype) for dtype, numel in sizes.items()
    }


class _Flat:
    """Gradients of one dtype, one after the other in host memory.

    Attributes:
        gradients: as parameters have them.
        memory: `(elements,)`.
    """

    def __init__(
        self, gradients: Sequence[torch.Tensor], memory: torch.Tensor, scale: float
    ) -> None:
        self.gradients = gradients
        self._scale = scale
        self.memory = memory[: sum(gradient.numel() for gradient in gradients)]

    def fetch(self) -> None:
        """Copy the gradients into the memory."""
        gather(self.memory, self.gradients).mul_(self._scale)

    def put_back(self) -> None:
        """Copy the memory into the gradients."""
        scatter(self.memory, self.gradients)


def _make_ready(
    devices: Devices, pool: ThreadPool, gradients: Sequence[torch.Tensor]
) -> None:
    """Check that the worker has the devices, and compute all gradients in one graph."""
    for name in {str(gradient.device) for gradient in gradients}:
        devices.require(name)
    pool.settle()  # as each use of the device lock ends; program threads may not have


def _mark(gradient: torch.Tensor | None) -> int:
    """Return a mark whose sum over all ranks tells how many have the gradient."""
    if gradient is None:
        return 0
    return 1 if gradient.layout is torch.strided else _SPARSE


def _check(parameters: Sequence[torch.Tensor], counts: Sequence[int], of: int) -> None:
    """Refuse sparse gradients, and parameters that differ from those of other ranks.

    Otherwise two ranks that each lack a different gradient of the same size would add
    up gradients of different parameters.
    """
    if not any(counts):
        raise UsageError(
            "no parameter of the optimizer has a gradient: compute a backward pass "
            "before you reduce its gradients"
        )
    for number, (parameter, count) in enumerate(zip(parameters, counts, strict=True)):
        name = f"parameter {number} of the optimizer, {tuple(parameter.shape)},"
        if count >= _SPARSE:
            raise UsageError(
                f"{name} has a sparse gradient: use nn.Embedding with sparse=False, or "
                "asyncrpc.ddp"
            )
        if count not in {0, of}:
            raise UsageError(
                f"{name} has a gradient at {count} of {of} ranks: compute the same "
                "gradients at all, or use asyncrpc.ddp with "
                "find_unused_parameters=True"
            )


def _by_dtype(
    parameters: Iterable[torch.Tensor],
) -> dict[torch.dtype, list[torch.Tensor]]:
    """Return the gradients of each dtype, in the same order at every rank."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_dtype.setdefault(parameter.grad.dtype, []).append(parameter.grad)
    return by_dtype


def _sizes(parameters: Iterable[torch.Tensor]) -> dict[torch.dtype, int]:
    """Return how many elements all the gradients of each dtype will ever have.

    Parameters without a gradient may get one: its memory takes no room until then.
    """
    numels: dict[torch.dtype, int] = {}
    for parameter in parameters:
        dtype = (parameter if parameter.grad is None else parameter.grad).dtype
        numels[dtype] = numels.get(dtype, 0) + parameter.numel()
    return numels
