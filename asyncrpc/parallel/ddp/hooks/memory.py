"""PowerSGD's memory from step to step: errors and Qs, for every bucket.

It is kept by bucket, as steps use it so, but belongs to parameters.  When buckets are
rebuilt, or when a module that loads it has other buckets, it is cut into the memory of
each parameter, which waits, `loose`, for the parameter's new bucket.

Parameters are known by numbers, which are the same wherever the memory is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from asyncrpc.errors import UsageError
from asyncrpc.parallel.ddp.flat import cut
from asyncrpc.parallel.ddp.hooks.low_rank import LowRankPlan, q_shapes, side_of

_NAMES: Final = ("errors", "qs", "layouts", "loose_errors", "loose_qs")


class BucketMemory:
    """Errors and Qs.

    Attributes:
        errors: by bucket, `(elements,)`, or longer, to fill a square.
        qs: by bucket, the Qs of all matrices, one after the other; of a square, `(side,
            rank)`.
        layouts: the parameters of each bucket, by their numbers.
        loose_errors: by parameter, flat; for parameters that are in no bucket yet.
        loose_qs: by parameter, `(columns, rank)`; for the same parameters.
    """

    def __init__(self) -> None:
        self.errors: dict[int, torch.Tensor] = {}
        self.qs: dict[int, torch.Tensor] = {}
        self.layouts: dict[int, tuple[int, ...]] = {}
        self.loose_errors: dict[int, torch.Tensor] = {}
        self.loose_qs: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the memory, as plain dictionaries of tensors that are not copied."""
        return {name: dict(getattr(self, name)) for name in _NAMES}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved memory."""
        for name in _NAMES:
            setattr(self, name, dict(state[name]))

    # --- buckets that have changed ---------------------------------------------------

    def stale(self, index: int, numbers: tuple[int, ...]) -> list[int]:
        """Return the buckets that are outdated if this one has these parameters."""
        if self.layouts.get(index) == numbers:
            return []
        return [
            other
            for other, theirs in self.layouts.items()
            if other == index or not set(numbers).isdisjoint(theirs)
        ]

    def loosen(
        self, index: int, parameters: Sequence[torch.Tensor], plan: LowRankPlan
    ) -> None:
        """Cut the memory of a bucket into that of its parameters."""
        numbers = self.layouts.pop(index)
        error = self.errors.pop(index, None)
        if error is not None:
            if error.numel() not in {plan.numel, side_of(plan.numel) ** 2}:
                raise _of_another(index, error, plan.numel)
            shapes = [(parameter.numel(),) for parameter in parameters]
            parts = cut(error[: plan.numel], shapes)
            self.loose_errors.update(zip(numbers, parts, strict=True))
        qs = self.qs.pop(index, None)
        # The Q of a square has no parts; nor do Qs that were made with other options.
        if qs is not None and qs.shape == (plan.q_numel,):
            each = (q for batch in cut(qs, q_shapes(plan)) for q in batch)
            for matrix, q in zip(plan.matrices, each, strict=True):
                self.loose_qs[numbers[matrix.place]] = q

    # --- the memory that a step begins with ------------------------------------------

    def error_for(
        self,
        index: int,
        parameters: Sequence[torch.Tensor],
        like: torch.Tensor,
        numel: int,
    ) -> torch.Tensor:
        """Return the errors of a bucket from memory; zeros if it has none.

        index: of the bucket, whose layout is known.
        parameters: of the bucket.
        like: has the dtype.
        numel: elements, at least those of the parameters.
        """
        error = self.errors.get(index)
        if error is None:
            error = like.new_zeros(numel)
            end = 0
            for number, parameter in zip(self.layouts[index], parameters, strict=True):
                start, end = end, end + parameter.numel()
                loose = self.loose_errors.pop(number, None)
                if loose is not None:
                    error[start:end].copy_(loose)
        if error.numel() != numel:
            raise _of_another(index, error, numel)
        self.errors[index] = error.to(like)
        return self.errors[index]

    def qs_for(
        self, index: int, plan: LowRankPlan, like: torch.Tensor
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the Qs of a bucket, and those among them that must be drawn."""
        known = self.qs.get(index)
        if known is not None and known.shape == (plan.q_numel,):
            return known.to(like), []
        qs = like.new_empty(plan.q_numel)
        missing: list[torch.Tensor] = []
        for batch, several in zip(plan.batches, cut(qs, q_shapes(plan)), strict=True):
            absent = []
            for matrix, q in zip(batch, several, strict=True):
                number = self.layouts[index][matrix.place]
                loose = self.loose_qs.pop(number, None)
                if loose is not None and loose.shape == q.shape:
                    q.copy_(loose)
                else:
                    absent.append(q)
            # A batch is drawn at once, as drawing one by one gives other numbers.
            missing += [several] if len(absent) == len(batch) else absent
        return qs, missing


def _of_another(index: int, error: torch.Tensor, numel: int) -> UsageError:
    return UsageError(
        f"this state keeps {error.numel()} errors for bucket {index}, which needs "
        f"{numel}: it belongs to another module, or to another hook"
    )
