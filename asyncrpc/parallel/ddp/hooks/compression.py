"""PowerSGD: gradients sent as products of two thin matrices.

The computation is in `low_rank`, and the memory from step to step in `memory`; here are
the options, the counts, and the saved state.

Source: torch/distributed/algorithms/ddp_comm_hooks/powerSGD_hook.py.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from asyncrpc.core.arguments import check_above, check_count, check_flags, wrong
from asyncrpc.errors import UsageError
from asyncrpc.parallel.collectives.group import Group
from asyncrpc.parallel.ddp.argument_checks import check_bucket, check_state
from asyncrpc.parallel.ddp.bucket import GradBucket
from asyncrpc.parallel.ddp.hooks.low_rank import LowRankPlan, plan_for
from asyncrpc.parallel.ddp.hooks.memory import BucketMemory
from asyncrpc.parallel.ddp.hooks.plain import average
from asyncrpc.parallel.ddp.hooks.states import HookState

logger = logging.getLogger("asyncrpc")

_SEEDS: Final = 1_000_000_000  # as many as torch draws from
_RANDOM_SEEDS: Final = 1 << 32  # that numpy takes
_STARTS_MIN: Final = 2
_OPTIONS: Final = (
    "matrix_approximation_rank",
    "start_powerSGD_iter",
    "min_compression_rate",
    "use_error_feedback",
    "warm_start",
    "orthogonalization_epsilon",
    "batch_tensors_with_same_shape",
    "compression_stats_logging_frequency",
)
_COUNTS: Final = (
    "iter",
    "total_numel_before_compression",
    "total_numel_after_compression",
    "next_stats_report",
)


class CompressionStats(NamedTuple):
    """The saving by compression, over all compressed steps.

    Attributes:
        rate: elements before by elements after; 0 if nothing was compressed.
        numel_before: elements of the gradients.
        numel_after: elements that were summed over all ranks.
    """

    rate: float
    numel_before: int
    numel_after: int


class PowerSGDState(HookState):
    """The options of PowerSGD, and its memory from step to step for one module.

    The first `start_powerSGD_iter` steps are not compressed.  All ranks make the state
    with the same options.  The errors differ between ranks; everything else is the
    same.  It is saved by pickle, or by `state_dict`; the group is left out.

    If a hook fails or is cancelled, or a rank is lost, the states of the ranks may
    differ: load a state that was saved, or make a new one.

    Attributes:
        process_group: the ranks, as given; None: those of the module.
        rng: draws the seeds of new Qs.
        iter: steps that have been made.
        next_stats_report: the step after which the rate is logged next.

    Source: torch's `PowerSGDState`, whose options these are.  It also has
    `p_memory_dict`, which no later step uses.
    """

    def __init__(
        self,
        process_group: Group | None,
        matrix_approximation_rank: int = 1,
        start_powerSGD_iter: int = 1_000,  # noqa: N803  torch's name
        min_compression_rate: float = 2,
        *,
        use_error_feedback: bool = True,
        warm_start: bool = True,
        orthogonalization_epsilon: float = 0,
        random_seed: int = 0,
        compression_stats_logging_frequency: int = 10_000,
        batch_tensors_with_same_shape: bool = False,
    ) -> None:
        """Make a state, with the same arguments at all ranks.

        Args:
            process_group: the ranks; None: those of the module it is registered with.
            matrix_approximation_rank: columns of P and Q: with fewer, less is sent.
                Begin with 1, and double it.
            start_powerSGD_iter: number of first steps that are not compressed, since
                gradients are most sensitive then; a tenth of all is a good start.
            min_compression_rate: a gradient is compressed if it becomes smaller by
                more than this.
            use_error_feedback: keep the errors of compression, and add them to the next
                gradient.  They take the memory of the gradients once more.
            warm_start: begin with the Qs of the step before.
            orthogonalization_epsilon: added to lengths before dividing by them, for
                gradients that may be all zero; `batched_powerSGD_hook` ignores it.
            random_seed: of the first Qs.
            compression_stats_logging_frequency: steps between two logs of the rate, of
                level INFO.
            batch_tensors_with_same_shape: multiply gradients of one shape together,
                which takes the memory of a copy.

        Raises:
            UsageError: an option is out of range; with `use_error_feedback` or
                `warm_start`, `start_powerSGD_iter` must be 2 or more, because the
                buckets are rebuilt after the first step.
        """
        super().__init__(process_group)
        check_count("matrix_approximation_rank", matrix_approximation_rank, at_least=1)
        check_count("start_powerSGD_iter", start_powerSGD_iter)
        check_above("min_compression_rate", min_compression_rate, 0)
        check_flags(
            use_error_feedback=use_error_feedback,
            warm_start=warm_start,
            batch_tensors_with_same_shape=batch_tensors_with_same_shape,
        )
        check_count("random_seed", random_seed)
        if random_seed >= _RANDOM_SEEDS:
            raise wrong("random_seed", f"below {_RANDOM_SEEDS}", random_seed)
        check_count(
            "compression_stats_logging_frequency", compression_stats_logging_frequency
        )
        _check_epsilon(orthogonalization_epsilon)
        if (use_error_feedback or warm_start) and start_powerSGD_iter < _STARTS_MIN:
            raise UsageError(
                f"start_powerSGD_iter is {start_powerSGD_iter}; it must be 2 or more "
                "with use_error_feedback or warm_start, since the buckets are rebuilt "
                "after the first step"
            )
        self.matrix_approximation_rank = matrix_approximation_rank
        self.start_powerSGD_iter = start_powerSGD_iter
        self.min_compression_rate = min_compression_rate
        self.use_error_feedback = use_error_feedback
        self.warm_start = warm_start
        self.orthogonalization_epsilon = orthogonalization_epsilon
        self.batch_tensors_with_same_shape = batch_tensors_with_same_shape
        self.compression_stats_logging_frequency = max(
            1, compression_stats_logging_frequency
        )
        # The generator that torch's hook has: another would draw other seeds.
        self.rng = np.random.RandomState(random_seed)
        self.iter = 0
        self.total_numel_before_compression = 0
        self.total_numel_after_compression = 0
        self.next_stats_report = 0
        self._memory = BucketMemory()
        self._warned_of_zeros = False

    @property
    def error_dict(self) -> dict[int, torch.Tensor]:
        """The errors of compression, by index of the bucket.

        `(elements,)`; `batched_powerSGD_hook` has more of them, which fill its square.
        """
        return self._memory.errors

    @property
    def q_memory_dict(self) -> dict[int, torch.Tensor]:
        """The Qs of the next step, by index of the bucket.

        The Qs of all matrices, one after the other; for `batched_powerSGD_hook` one Q,
        `(side, rank)`.
        """
        return self._memory.qs

    # --- counting --------------------------------------------------------------------

    def maybe_increase_iter(self, bucket: GradBucket) -> None:
        """Count a step, if the bucket is the last one.

        Raises:
            UsageError: `bucket` is not a GradBucket.
        """
        check_bucket(bucket)
        if bucket.is_last():
            self.iter += 1
            if self.iter == self.start_powerSGD_iter:
                logger.info("PowerSGD compresses gradients after %d steps", self.iter)

    def compression_stats(self) -> CompressionStats:
        """Return the saving by compression so far."""
        before = self.total_numel_before_compression
        after = self.total_numel_after_compression
        return CompressionStats(before / after if after else 0, before, after)

    def count(self, bucket: GradBucket, before: int, after: int) -> None:
        """Internal: count elements before and after compression; log them at times."""
        self.total_numel_before_compression += before
        self.total_numel_after_compression += after
        if bucket.is_last() and self.iter >= self.next_stats_report:
            stats = self.compression_stats()
            logger.info(
                "PowerSGD at step %d: %d elements before compression, %d after, rate "
                "%.4g",
                self.iter,
                stats.numel_before,
                stats.numel_after,
                stats.rate,
            )
            self.next_stats_report = (
                self.iter + self.compression_stats_logging_frequency
            )

    def warn_of_zeros(self, zeros: int) -> None:
        """Internal: log once that some columns could not be normalized."""
        if zeros and not self._warned_of_zeros:
            self._warned_of_zeros = True
            logger.warning(
                "PowerSGD: %d columns of zeros cannot be normalized, and stay zero; "
                "a small orthogonalization_epsilon such as 1e-8 avoids this",
                zeros,
            )

    # --- saving ----------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the state without the group: tensors and plain values, not copied.

        `torch.load` reads it with `weights_only=True`.
        """
        drawn = self.rng.get_state(legacy=False)
        return {
            **{name: getattr(self, name) for name in (*_OPTIONS, *_COUNTS)},
            "rng": {
                "key": torch.from_numpy(drawn["state"]["key"].astype(np.int64)),
                "pos": drawn["state"]["pos"],
            },
            "memory": self._memory.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved state, options included; group and module stay.

        Args:
            state: from `state_dict`; its tensors are used, not copied, and change.

        Raises:
            UsageError: the state has other fields.
        """
        check_state(state, (*_OPTIONS, *_COUNTS, "rng", "memory"), "state")
        for name in (*_OPTIONS, *_COUNTS):
            setattr(self, name, state[name])
        key, position = state["rng"]["key"], state["rng"]["pos"]
        words = key.numpy().astype(np.uint32)
        self.rng.set_state(("MT19937", words, position, 0, 0.0))
        self._memory.load_state_dict(state["memory"])

    def __getstate__(self) -> dict[str, Any]:
        logger.warning("a PowerSGDState is saved without its group")
        return self.state_dict()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(None)  # type: ignore[misc]  # unsaved fields are as if new
        self.load_state_dict(state)
        logger.warning(
            "a PowerSGDState was loaded without a group: it uses that of the module it "
            "is registered with, unless `process_group` is set"
        )

    async def average_errors(self) -> None:
        """Replace errors by their mean over all ranks, after the same step at each.

        Steps depend on the mean only.  So training goes on as it would have, but for
        rounding, and the state of any rank is that of all ranks: any number of ranks
        can load it.

        Raises:
            CollectiveError: a rank failed or was lost; all ranks fail, and their errors
                may differ then.
            UsageError: the state has no group yet, or this is not the worker's event
                loop.

        Cancellation:
            The call fails on all ranks; their errors may differ then.
        """
        self.group.host.check_on_loop("PowerSGDState.average_errors")
        for errors in (self._memory.errors, self._memory.loose_errors):
            for key in sorted(errors):
                await average(self.group, errors[key])

    # --- steps, as the hooks make them -----------------------------------------------

    def begin(self, bucket: GradBucket) -> LowRankPlan:
        """Internal: cut the memory as the buckets are cut; return the plan of one."""
        memory, index = self._memory, bucket.index()
        numbers = self.numbers_of(bucket.parameters())
        for other in memory.stale(index, numbers):
            theirs = [self.parameter(number) for number in memory.layouts[other]]
            memory.loosen(other, theirs, self._plan_for(theirs))
        memory.layouts[index] = numbers
        return self._plan_for(bucket.parameters())

    def _plan_for(self, parameters: Sequence[torch.Tensor]) -> LowRankPlan:
        return _cached_plan(
            tuple(parameter.shape for parameter in parameters),
            self.matrix_approximation_rank,
            self.min_compression_rate,
            self.batch_tensors_with_same_shape,
        )

    def error_for(self, bucket: GradBucket, numel: int) -> torch.Tensor | None:
        """Internal: return the errors of a bucket; None without error feedback.

        Args:
            bucket: one that `begin` got.
            numel: elements; more than those of the bucket fill a square.

        Raises:
            UsageError: the kept errors have another size.
        """
        if not self.use_error_feedback:
            return None
        return self._memory.error_for(
            bucket.index(), bucket.parameters(), bucket.buffer(), numel
        )

    def qs_for(self, bucket: GradBucket, plan: LowRankPlan) -> torch.Tensor:
        """Internal: return the first Qs of a step; draw those that are missing."""
        index = bucket.index()
        is_new = index not in self._memory.qs
        qs, missing = self._memory.qs_for(index, plan, bucket.buffer())
        # torch also draws a seed for a bucket without matrices.
        if missing or (is_new and not plan.batches):
            self._draw(missing)
        self._keep(index, qs)
        return qs

    def q_for(self, bucket: GradBucket, side: int, rank: int) -> torch.Tensor:
        """Internal: return a square's Q, `(side, rank)`, that a step begins with."""
        q = self._memory.qs.get(bucket.index())
        if q is not None and q.shape == (side, rank):
            q = q.to(bucket.buffer())
        else:
            q = bucket.buffer().new_empty(side, rank)
            self._draw([q])
        self._keep(bucket.index(), q)
        return q

    def _keep(self, index: int, qs: torch.Tensor) -> None:
        if self.warm_start:
            self._memory.qs[index] = qs

    def _draw(self, targets: Sequence[torch.Tensor]) -> None:
        """Fill tensors with random numbers, the same at all ranks and as torch's."""
        draw = torch.Generator().manual_seed(int(self.rng.randint(_SEEDS)))
        for target in targets:
            target.copy_(
                torch.randn(
                    target.shape, dtype=target.dtype, generator=draw, device="cpu"
                )
            )


def _check_epsilon(epsilon: float) -> None:
    name = "orthogonalization_epsilon"
    check_above(name, epsilon, -1)
    if not 0 <= epsilon < math.inf:
        raise wrong(name, "a number of at least 0", epsilon)


@functools.lru_cache(maxsize=1024)  # buckets of a process; a plan takes 0.1 ms
def _cached_plan(
    shapes: tuple[torch.Size, ...],
    rank: int,
    rate_min: float,
    batch: bool,  # noqa: FBT001  a key of the cache
) -> LowRankPlan:
    return plan_for(shapes, rank, rate_min, batch=batch)
