"""Means of parameters over ranks, between some steps, as local SGD needs them.

All parameters of an averaging are one tensor, in memory that the group shares, so that
it is reduced in place.  The parameters change only after all of it has gone well: a
rank on which it fails keeps its own.

Source: torch/distributed/algorithms/model_averaging/averagers.py and
hierarchical_model_averager.py; Lin et al., "Don't Use Large Mini-Batches, Use Local
SGD", ICLR 2020; Lin et al., 2020, on hierarchies.
"""

from __future__ import annotations

import functools
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from asyncrpc.core.arguments import check_count, check_kind, listed, wrong
from asyncrpc.core.torch_modes import plain_steps
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import check_group
from asyncrpc.parallel.ddp.flat import gather, scatter
from asyncrpc.parallel.ddp.initial import verify
from asyncrpc.parallel.ddp.joining import Joinable
from asyncrpc.parallel.ddp.recreatable_group import RecreatableGroup, reason_for
from asyncrpc.parallel.ddp.threads import run_beside, user_of

logger = logging.getLogger("asyncrpc")

Averaged: TypeAlias = Iterable[torch.Tensor] | Iterable[Mapping[str, Any]]


class ModelAverager(ABC):
    """Decides at each step whether parameters are averaged, and over which ranks.

    Attributes:
        group: as given.
        step: how many steps there have been.

    Source: torch's `ModelAverager`.
    """

    def __init__(self, group: Group) -> None:
        """Begin at step 0.

        Args:
            group: all ranks; every rank makes its averagers in the same order.

        Raises:
            UsageError: `group` is not a Group.
        """
        check_group(group)
        self.group = group
        self.step = 0
        self._joinable = Joinable()

    @abstractmethod
    def _due(self) -> _Mean | None:
        """Return the mean to take at this step; None: none is due."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the group, on the event loop.  Idempotent."""

    @plain_steps
    async def average_parameters(self, params: Averaged) -> None:
        """Average parameters over ranks, if that is due, and count a step.

        After an error this rank's parameters and `step` are unchanged.

        Args:
            params: parameters, or groups of them as optimizers have; parameters without
                a gradient are left out.  All ranks that average must have the same.

        Raises:
            UsageError: ranks have other parameters than the first of them, or a
                parameter has a dtype that cannot be averaged.  Or `params` has the
                wrong type, a `join` is active that does not know of it, or this is not
                the worker's event loop: then nothing is sent.
            CollectiveError: a rank failed; the averaging fails on all ranks that have
                not ended it.

        Cancellation:
            The averaging fails on all ranks that have not ended it.
        """
        parameters = _with_gradients(params)
        self.group.host.check_on_loop("average_parameters")
        self._joinable.check("an averaging of parameters")
        await self._joinable.begin()
        mean = self._due()
        if mean is not None:
            await mean.take(parameters)
        self.step += 1


class PeriodicModelAverager(ModelAverager):
    """Averages over all ranks every few steps, after a warm-up.

    Attributes:
        period: steps from one averaging to the next.
        warmup_steps: steps before the first.

    Example:
        >>> averager = PeriodicModelAverager(group, period=4, warmup_steps=100)
        >>> for inputs in batches:
        ...     ...  # forward, backward, a step of the optimizer
        ...     await averager.average_parameters(model.parameters())

    Source: torch's `PeriodicModelAverager`.
    """

    def __init__(self, group: Group, period: int, *, warmup_steps: int = 0) -> None:
        """Begin at step 0; nothing is sent.

        Args:
            group: the ranks.
            period: steps from one averaging to the next; the same at all ranks.
            warmup_steps: steps without averaging before that, as many as the
                `start_localSGD_iter` of the communication hook.

        Raises:
            UsageError: `period` is not positive, or `warmup_steps` negative.
        """
        super().__init__(group)
        check_count("period", period, at_least=1)
        check_count("warmup_steps", warmup_steps)
        if period == 1:
            _warn_of_period_1()
        self.period = period
        self.warmup_steps = warmup_steps
        self._mean = _Mean(RecreatableGroup(group))

    def _due(self) -> _Mean | None:
        after = self.step - self.warmup_steps
        return self._mean if after >= 0 and after % self.period == 0 else None

    def close(self) -> None:
        """Let go of the group, on the event loop.  Idempotent."""
        self._mean.own.close()


class HierarchicalModelAverager(ModelAverager):
    """Averages over few ranks often, and over more ranks less often.

    At a step that is a multiple of several periods, the longest of them counts.

    Attributes:
        period_group_size_dict: as given.
        warmup_steps: steps before the first averaging.

    Example:
        >>> averager = HierarchicalModelAverager(  # of 16 ranks
        ...     group, {4: 8, 16: 16}, warmup_steps=100
        ... )

    Source: torch's `HierarchicalModelAverager`.
    """

    def __init__(
        self,
        group: Group,
        period_group_size_dict: Mapping[int, int],
        *,
        warmup_steps: int = 0,
    ) -> None:
        """Begin at step 0; nothing is sent.

        Args:
            group: all ranks.
            period_group_size_dict: number of ranks by period, in steps; longer periods
                have as many ranks or more, and the longest has all.  Neighbours by rank
                average together: of 8 ranks by 4, ranks 0 to 3 and 4 to 7.
            warmup_steps: steps without averaging before that.

        Raises:
            UsageError: no period is given; periods or sizes are not positive, or do not
                grow; a size does not divide that of the group; the last size is not
                that of the group; or `warmup_steps` is negative.
        """
        super().__init__(group)
        check_count("warmup_steps", warmup_steps)
        _check_levels(period_group_size_dict, group.size)
        self.period_group_size_dict = dict(period_group_size_dict)
        self.warmup_steps = warmup_steps
        self._means = {
            period: _Mean(RecreatableGroup(group, _block(group, size)))
            for period, size in period_group_size_dict.items()
        }

    def _due(self) -> _Mean | None:
        if self.step < self.warmup_steps:
            return None
        for period in reversed(self._means):
            if self.step % period == 0:
                return self._means[period]
        return None

    def close(self) -> None:
        """Let go of all groups, on the event loop.  Idempotent."""
        for mean in self._means.values():
            mean.own.close()


class _Mean:
    """Averages over one group of ranks."""

    def __init__(self, own: RecreatableGroup) -> None:
        self.own = own
        self._memory: torch.Tensor | None = None  # of the group, kept for the next one

    async def take(self, parameters: Sequence[torch.Tensor]) -> None:
        """Replace parameters by their means over the ranks."""
        group = self.own.enter()
        try:
            await self._take(group, parameters)
        except BaseException as error:
            self._memory = None  # another rank may still write to it
            self.own.leave(reason_for("an averaging of parameters", error))
            raise

    async def _take(self, group: Group, parameters: Sequence[torch.Tensor]) -> None:
        names = {f"parameter {n}": parameter for n, parameter in enumerate(parameters)}
        try:
            await verify(group, names, {})
        except UsageError as error:
            raise UsageError(
                f"the parameters with a gradient are averaged: {error}"
            ) from error
        if not parameters:
            return
        dtype = _dtype_of(parameters)
        numel = sum(parameter.numel() for parameter in parameters)
        memory = self._memory
        if memory is None or memory.dtype != dtype or memory.numel() != numel:
            self._memory = None
            memory = await group.empty(numel, dtype=dtype)
        # Divided before the sum, as torch does, so that the sum does not overflow the
        # dtype, and over two ranks the bits are torch's.
        user = user_of(group.host, parameters)

        def divided() -> None:
            gather(memory, parameters).div_(group.size)

        await run_beside(divided, memory.nbytes, user)
        await group.all_reduce(memory)
        take = functools.partial(scatter, memory, parameters)
        await run_beside(take, memory.nbytes, user)
        self._memory = memory


def _with_gradients(params: Averaged) -> list[torch.Tensor]:
    """Return the parameters that have gradients, also those in groups."""
    wanted = "a list of parameters, or of groups of them"
    if isinstance(params, torch.Tensor):
        raise wrong("params", wanted, params)
    parameters: list[torch.Tensor] = []
    for index, entry in enumerate(listed("params", params, wanted)):
        its_name = f"params[{index}]"
        if isinstance(entry, Mapping) and "params" in entry:
            parameters += listed(its_name, entry["params"], wanted)
        else:
            check_kind(its_name, entry, torch.Tensor, "a tensor, or a group of tensors")
            parameters.append(entry)
    return [parameter for parameter in parameters if parameter.grad is not None]


def _dtype_of(parameters: Sequence[torch.Tensor]) -> torch.dtype:
    """Return the dtype in which parameters are added: their widest."""
    dtypes = [parameter.dtype for parameter in parameters]
    for number, dtype in enumerate(dtypes):
        if not (dtype.is_floating_point or dtype.is_complex):
            raise UsageError(
                f"parameter {number} has dtype {dtype}, which cannot be averaged; "
                "leave it out"
            )
    return functools.reduce(torch.promote_types, dtypes)


def _block(group: Group, size: int) -> Sequence[int]:
    """Return the ranks that average with this one, `size` at a time."""
    first = group.rank - group.rank % size
    return range(first, first + size)


def _check_levels(levels: Mapping[int, int], ranks: int) -> None:
    name = "period_group_size_dict"
    check_kind(name, levels, Mapping, "numbers of ranks by period")
    for number in (*levels, *levels.values()):
        check_kind(name, number, int, "numbers of ranks by period")
    if not levels:
        raise UsageError("period_group_size_dict must have at least one period")
    periods, sizes = list(levels), list(levels.values())
    for noun, numbers in (("period", periods), ("size", sizes)):
        if numbers[0] < 1 or numbers != sorted(numbers):
            raise UsageError(
                f"each {noun} of period_group_size_dict must be positive, and not "
                f"smaller than the one before, not {numbers}"
            )
    if sizes[-1] != ranks or any(ranks % size for size in sizes):
        raise UsageError(
            "sizes in period_group_size_dict must divide the number of ranks, "
            f"{ranks}, and the last must be {ranks}, not {sizes}"
        )
    if periods[-1] == 1:
        _warn_of_period_1()


def _warn_of_period_1() -> None:
    logger.warning(
        "averaging parameters at every step costs as much as averaging gradients: use "
        "DistributedDataParallel without averaging"
    )
