"""What the tests of devices call on other workers."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import torch

import asyncrpc
from asyncrpc import devices
from asyncrpc.autograd import get_gradients

let_go = threading.Event()  # of `hold`, in this process


def where(*tensors: torch.Tensor) -> list[str]:
    return [str(tensor.device) for tensor in tensors]


def double(tensor: torch.Tensor) -> torch.Tensor:
    return tensor * 2


def counted_up(tensor: torch.Tensor, steps: int) -> torch.Tensor:
    """Return a tensor that goes on counting for a while after this returns."""
    clone = tensor.clone()
    for _ in range(steps):
        clone.add_(1)
    return clone


@asyncrpc.async_execution
def counted_in_a_future(tensor: torch.Tensor, steps: int) -> Any:
    """Return a future of torch that is set before its stream has counted."""
    cuda: Any = torch.cuda
    stream = cuda.Stream(tensor.device)
    stream.wait_stream(cuda.current_stream(tensor.device))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future(
        devices=[tensor.device]
    )
    with cuda.stream(stream):
        future.set_result(counted_up(tensor, steps))
    return future


def same(value: Any) -> Any:
    return value


async def same_awaited(value: Any) -> Any:
    return value


def zeros(shape: list[int], device: str) -> torch.Tensor:
    return torch.zeros(shape, device=device)


async def fetched(reference: Any) -> torch.Tensor:
    tensor: torch.Tensor = await reference.to_here()
    return tensor


async def double_awaited(tensor: torch.Tensor) -> torch.Tensor:
    return await devices.run(double, tensor)


@asyncrpc.async_execution
def double_elsewhere(to: str, tensor: torch.Tensor) -> Any:
    return asyncrpc.current_worker().parts.start_call(to, double, (tensor,))


def double_there(to: str, tensor: torch.Tensor) -> Any:
    """Call on, and block this thread meanwhile."""
    there = asyncrpc.current_worker().parts.start_call(to, double, (tensor,)).wait()
    return there + tensor


def raising(tensor: torch.Tensor) -> None:
    raise ValueError("cannot", tensor)


def hold(tensor: torch.Tensor) -> torch.Tensor:
    """Keep a thread, and the device if it is exclusive, until `let_go` is set."""
    let_go.wait()
    return tensor


def counting(tensor: torch.Tensor, count: int) -> Iterator[torch.Tensor]:
    for number in range(count):
        yield tensor + number


async def counting_awaited(
    tensor: torch.Tensor, count: int
) -> AsyncIterator[torch.Tensor]:
    for _ in range(count):
        yield tensor


class Table:
    """A value that stays on its worker, with a tensor on a device."""

    def __init__(self, device: str) -> None:
        self._rows = torch.arange(6.0).view(3, 2).to(device)

    def rows(self) -> torch.Tensor:
        return self._rows

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        self._rows = self._rows + tensor
        return self._rows


class Layer(torch.nn.Module):
    """Weights that are the same wherever they are made."""

    def __init__(self, device: str, seed: int = 1, width: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(width, width, generator=generator)
        self.weight = torch.nn.Parameter(weight.to(device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(inputs @ self.weight)

    def weights(self) -> torch.Tensor:
        return self.weight.detach().cpu()

    async def weight_reference(self) -> Any:
        return asyncrpc.RRef(self.weight)

    def gradient(self, context_id: list[int]) -> torch.Tensor | None:
        """Return the gradient that an autograd context has for the weight."""
        service: Any = asyncrpc.current_worker().parts.service("autograd")
        value = get_gradients(service.context_of(context_id)).get(self.weight)
        return None if value is None else value.cpu()
