"""Stages of pipelines, on workers or in one process: importable in any process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import asyncrpc
from asyncrpc import RRef
from tests.numerics.remote import Layer, Tensors
from tests.numerics.stateful_objects import Gate

SHAPES = ((5, 7, 1), (7, 4, 2), (4, 2, 3))  # inputs, outputs and seed of each stage


def batch(rows: int = 10, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(columns: int) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator, dtype=torch.float64)

    return draw(5), draw(2)


def model() -> nn.Sequential:
    return nn.Sequential(*(Layer(*shape) for shape in SHAPES))


def in_one_process(
    module: nn.Module, x: Any, target: Any, loss_fn: Any
) -> tuple[torch.Tensor, Tensors]:
    loss = loss_fn(module(*x) if isinstance(x, tuple) else module(x), target)
    loss.backward()
    gradients = [parameter.grad for parameter in module.parameters()]
    return loss.detach(), [gradient for gradient in gradients if gradient is not None]


def stages_on(where: str, kind: Any = Layer, *more: Any) -> list[RRef[Any]]:
    """Return a stage of each shape, on workers of these names."""
    placed = zip(where, SHAPES, strict=True)
    return [asyncrpc.remote(name, kind, (*shape, *more)) for name, shape in placed]


class Graph:
    """Lives as long as the graph that it is in."""

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()
    most: ClassVar[dict[str, int]] = {}  # by stage; workers of a test share it
    lock = threading.Lock()

    def __init__(self, stage: str) -> None:
        self.stage = stage
        with self.lock:
            self.alive.add(self)
            now = sum(graph.stage == stage for graph in list(self.alive))
            self.most[stage] = max(now, self.most.get(stage, 0))


class _Track(torch.autograd.Function):
    """Passes a tensor on, and leaves a `Graph` in the graph."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, stage: str) -> torch.Tensor:
        ctx.graph = Graph(stage)
        return x.clone()

    @staticmethod
    def backward(_ctx: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0], None


class Tracked(Layer):
    """A layer that counts the graphs of it that are alive."""

    def __init__(self, inputs: int, outputs: int, seed: int, stage: str) -> None:
        super().__init__(inputs, outputs, seed)
        self.stage = stage

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Track.apply(super().forward(x), self.stage)  # type: ignore[no-untyped-call]
        return result


class StageError(Exception):
    """One that neither torch nor asyncrpc knows."""


class _FailBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor, error: Exception) -> torch.Tensor:
        _ctx.error = error
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise type(ctx.error)(*ctx.error.args)


class Failing(Tracked):
    """A layer that raises at a call, in its forward or its backward pass.

    `gate` stops it there instead, until a test lets it go on.
    """

    def __init__(
        self, shape: Sequence[Any], error: Exception | None, where: str, at: int
    ) -> None:
        super().__init__(*shape)
        self.error, self.where, self.at = error, where, at
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        result = super().forward(x)
        if self.calls != self.at:
            return result
        if self.where == "gate":
            Gate.open_ones["gate"].pass_through()
        elif self.where == "forward":
            assert self.error is not None
            raise type(self.error)(*self.error.args)
        elif self.where == "backward":
            result = _FailBackward.apply(result, self.error)  # type: ignore[no-untyped-call]
        return result


class Front(nn.Module):
    """Takes numbers of words and a mask; returns tensors in containers."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.table = nn.Parameter(
            torch.randn(9, 4, generator=generator, dtype=torch.float64)
        )

    def forward(
        self, words: torch.Tensor, options: dict[str, Any]
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        embedded = self.table[words]
        more = {
            "mask": options["mask"],
            "unused": embedded * 2,
            "scale": options["scale"],
        }
        return embedded.sin(), more


class Middle(nn.Module):
    """Takes two arguments, returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(4, 3, 8)

    def forward(self, x: torch.Tensor, more: dict[str, Any]) -> dict[str, Any]:
        y = self.layer(x * more["scale"])
        return {"y": y * 3, "pair": [y.cos(), more["mask"]]}


class Back(nn.Module):
    """Takes a dictionary; changes it in place before anything else."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
        y: torch.Tensor = inputs["y"].mul_(2.0)
        cosine, mask = inputs["pair"]
        result: torch.Tensor = (y + cosine) * self.weight * mask[:, None]
        return result


class Calling(nn.Module):
    """A module that computes on another worker."""

    def __init__(self, to: str) -> None:
        super().__init__()
        self.to_worker = to

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sine: torch.Tensor = asyncrpc.rpc_sync(self.to_worker, torch.sin, (x,))
        return sine


class Recomputing(Layer):
    """Keeps no activations: they are computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = checkpoint(super().forward, x, use_reentrant=False)
        return output


class _Nap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Napping(nn.Module):
    """Takes as long as it is told to, forward, and twice as long backward.

    In place of work that needs a processor of its own, which the workers of a test do
    not have.
    """

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = _Nap.apply(x * self.weight, self.seconds)  # type: ignore[no-untyped-call]
        return output


class Endless(nn.Module):
    """Raises what no future can hold."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = next(iter([x][:0]))
        return output


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Return the mean over rows."""
    return (output - target).square().sum(1).mean()


def squared_sum(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def of_pairs(output: torch.Tensor, target: tuple[torch.Tensor, int]) -> torch.Tensor:
    """Take a target that is no tensor alone."""
    rows, power = target
    return (output - rows).pow(power).sum(1).mean()


def per_row(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum(1)


def a_number(output: torch.Tensor, target: torch.Tensor) -> float:
    return (output - target).square().sum().item()


def failing_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    raise StageError("no loss")


async def held(stage: RRef[Any]) -> int:
    """Return how many micro-batches a stage holds; called on its worker."""
    held_count: int = (await stage.to_here()).held
    return held_count


async def call_from(to: str, function: Any, *args: Any) -> Any:
    """Call a function from where this runs."""
    return await asyncrpc.rpc_async(to, function, args)


async def waiting(stage: RRef[Any]) -> int:
    """Return how many inputs wait at a stage, whose module has not seen them."""
    runs = (await stage.to_here())._runs.values()  # noqa: SLF001
    return sum(len(run._inputs) for run in runs)  # noqa: SLF001


async def settled(module: RRef[nn.Module]) -> list[torch.Tensor | None]:
    """Return the gradients of the caller's context, when its passes here have ended."""
    ctx = asyncrpc.autograd.current_context()
    gradients = await ctx.service.gathered(ctx.id)
    return [
        gradients.get(parameter) for parameter in (await module.to_here()).parameters()
    ]
