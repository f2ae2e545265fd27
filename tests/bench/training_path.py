"""One training step of a remote layer, with marks: the same on both sides.

Which place a step passes when, in both processes, is taken down on one clock, as
`tracing` does for calls.  Marks of a backward pass are nodes of the graph: torch's
engine passes them, whoever runs it.
"""

from __future__ import annotations

import enum
import resource
from typing import Any, Self

import torch
from torch import nn

from tests.bench import training as t
from tests.bench.tracing import mark


class Place(enum.IntEnum):
    """Where a step passes, in order; the text says what led up to it, and where."""

    text: str
    at: str

    def __new__(cls, number: int, at: str, text: str) -> Self:
        """Make a member that is a number and has two texts."""
        place = int.__new__(cls, number)
        place._value_ = number
        place.at, place.text = at, text
        return place

    BEGIN = 0, "trainer", ""
    OPENED = 1, "trainer", "open a context"
    FORWARD = 2, "->", "rows to the layer's worker"
    FORWARDED = 3, "owner", "forward"
    ANSWERED = 4, "<-", "its result to the trainer"
    LOSS = 5, "trainer", "loss"
    GRADIENT = 6, "trainer", "gradient of the result"
    ARRIVED = 7, "->", "gradient to the layer's worker"
    COMPUTED = 8, "owner", "gradients of the layer"
    PASSED = 9, "<-", "end of the pass"
    STEP = 10, "->", "the step's request"
    APPLIED = 11, "owner", "SGD"
    STEPPED = 12, "<-", "the step's answer"
    END = 13, "trainer", "close the context"


def usage() -> list[float]:
    """Return how often this process has waited, was displaced, and computed, in s."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return [used.ru_nvcsw, used.ru_nivcsw, used.ru_utime + used.ru_stime]


class _Marked(torch.autograd.Function):
    """Changes nothing; marks when a gradient passes."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, place: int) -> torch.Tensor:
        ctx.place = place
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        mark(ctx.place)
        return gradient, None


def marked(tensor: torch.Tensor, place: Place) -> torch.Tensor:
    """Return a tensor whose gradient leaves a mark."""
    output: torch.Tensor = _Marked.apply(tensor, place)  # type: ignore[no-untyped-call]
    return output


class TracedLayer(nn.Module):
    """The layer of `remote Linear, forward to step`, with marks."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(t.FEATURES, t.FEATURES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(BATCH, FEATURES)` to the same shape."""
        mark(Place.FORWARD)
        weight = marked(self.linear.weight, Place.COMPUTED)
        output = nn.functional.linear(rows, weight, self.linear.bias)
        output = marked(output, Place.ARRIVED)
        mark(Place.FORWARDED)
        return output


class TracedSGD(torch.optim.SGD):
    """Torch's SGD, with marks."""

    def step(self, closure: Any = None) -> Any:
        mark(Place.STEP)
        loss = super().step(closure)
        mark(Place.APPLIED)
        return loss
