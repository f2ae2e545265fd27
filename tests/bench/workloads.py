"""What is measured: rows, sizes, and the functions that both sides call.

Both sides call the same functions with the same values, between two processes with one
torch thread each.  Each is used as its users would: asyncrpc by `await` on its event
loop, torch.distributed.rpc by blocking calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import nn

from tests.bench.harness import Row

CALLER, CALLEE = "caller", "callee"
OUTSTANDING: Final = 256
SIZES_MIB: Final = (1, 16, 256)
KIB_FLOATS: Final = 256  # 1 KiB of float32
FEATURES: Final = 256
BATCH: Final = 64
LEARNING_RATE: Final = 0.01


def _latency(name: str) -> list[Row]:
    return [Row(f"{name}, p50", "us"), Row(f"{name}, p99", "us")]


def _rate(name: str, unit: str) -> list[Row]:
    return [Row(name, unit, higher_is_better=True)]


WORKLOADS: Final[Mapping[str, Sequence[Row]]] = {
    "call_async": _latency("call, async def callee"),
    "call_def": _latency("call, def callee"),
    "tensor_add": _latency("add 1 to 1 KiB tensor"),
    "many_async": _rate(f"{OUTSTANDING} outstanding, async def", "calls/s"),
    "many_def": _rate(f"{OUTSTANDING} outstanding, def", "calls/s"),
    **{
        f"{way}_{size}": _rate(f"{size} MiB tensor, {words}", "GB/s")
        for way, words in (("send", "one way"), ("echo", "echoed"))
        for size in SIZES_MIB
    },
    "rref": _rate("RRef: create, call, fetch", "1/s"),
    "autograd": _rate("remote Linear, forward to step", "steps/s"),
}


def rows_of(names: Sequence[str]) -> list[Row]:
    """Return the lines of the table for some workloads."""
    return [row for name in names for row in WORKLOADS[name]]


# --- what the callee runs ------------------------------------------------------------


def nothing() -> None:
    """Return at once."""


async def nothing_async() -> None:
    """Return at once; torch.distributed.rpc has no counterpart and gets `nothing`."""


def add_one(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def shape_of(tensor: torch.Tensor) -> list[int]:
    return list(tensor.shape)


def echo(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


class Counter:
    """What the references refer to."""

    def __init__(self) -> None:
        self.count = 0

    def add(self, amount: int) -> int:
        self.count += amount
        return self.count


class Layer(nn.Module):
    """The remote half of the training step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, FEATURES)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Map `(BATCH, FEATURES)` to the same shape."""
        result: torch.Tensor = self.linear(rows)
        return result
