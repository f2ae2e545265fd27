"""What mypy makes of remote modules: calls by an interface are checked and typed.

Checked with the rest of tests by `make type`, and never run.
"""

from abc import ABC, abstractmethod
from typing import Protocol, assert_type

import torch
from torch import nn

from asyncrpc import RRef
from asyncrpc.nn import RemoteModule
from asyncrpc.optim import DistributedOptimizer, StepResult


class Encoder(Protocol):
    async def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor: ...

    async def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, int]: ...


class Decoder(ABC):
    @abstractmethod
    async def decode(self, x: torch.Tensor) -> list[str]:
        """Return words."""

    async def first(self, x: torch.Tensor) -> str:
        return (await self.decode(x))[0]


async def check(module: RemoteModule, x: torch.Tensor) -> None:
    encoder = await module.typed(Encoder)
    assert_type(encoder, Encoder)
    assert_type(await encoder.encode(x, scale=2.0), torch.Tensor)
    assert_type(await encoder(x), tuple[torch.Tensor, int])
    await encoder.encode("x")  # type: ignore[arg-type]
    await encoder.encode(x, 2.0)  # type: ignore[call-arg]
    await encoder.decode(x)  # type: ignore[attr-defined]

    decoder = await module.typed(Decoder)
    assert_type(decoder, Decoder)
    assert_type(await decoder.decode(x), list[str])
    assert_type(await decoder.first(x), str)
    await decoder.decode()  # type: ignore[call-arg]

    assert_type(await module.remote_parameters(), list[RRef[nn.Parameter]])
    assert_type(await module.to(torch.float64), RemoteModule)
    await module.to("cuda")  # type: ignore[arg-type]


async def check_optimizer(parameters: list[RRef[nn.Parameter]]) -> None:
    optimizer = await DistributedOptimizer("SGD", parameters, lr=0.1)
    assert_type(optimizer, DistributedOptimizer)
    torch.optim.lr_scheduler.StepLR(optimizer.options, step_size=1)
    assert_type(await optimizer.step(), StepResult)
    DistributedOptimizer(torch.optim.Adam, [{"params": parameters, "lr": 0.1}])
    DistributedOptimizer(nn.Linear, parameters)  # type: ignore[arg-type]
