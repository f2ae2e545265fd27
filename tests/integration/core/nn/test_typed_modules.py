"""A remote module as an object of an interface: typed calls, checked on the owner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import pytest
import torch
from torch import nn

import asyncrpc
from asyncrpc.autograd import backward, context, get_gradients
from asyncrpc.errors import UsageError
from asyncrpc.nn import RemoteModule
from asyncrpc.testing import acting_as
from tests.integration.core.groups import processes
from tests.integration.core.nn.test_remote_module import three_workers

X = torch.arange(3.0)


class Encoder(Protocol):
    async def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor: ...

    async def where(self) -> str: ...

    async def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class Decoder(ABC):
    @abstractmethod
    async def words(self, x: torch.Tensor) -> list[str]:
        """Return a word for each element."""

    async def text(self, x: torch.Tensor) -> str:
        """Join the words, here."""
        return " ".join(await self.words(x)) + f" at {asyncrpc.current_worker().name}"


class Codec(nn.Module):
    """Has the methods of both interfaces, some plain and some not."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return x * self.weight * scale

    async def where(self) -> str:
        return asyncrpc.current_worker().name

    def words(self, x: torch.Tensor) -> list[str]:
        return [str(number) for number in x.tolist()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x) + 1.0


async def test_methods_of_a_protocol_run_on_the_module() -> None:
    async with three_workers():
        encoder = await RemoteModule("b", Codec).typed(Encoder)
        assert (await encoder.encode(X, scale=3.0)).tolist() == [0.0, 6.0, 12.0]
        assert (await encoder(X)).tolist() == [1.0, 3.0, 5.0]
        assert await encoder.where() == "b"
        assert repr(encoder) == "<Encoder of <RemoteModule on 'b/cpu'>>"


async def test_an_abstract_class_runs_its_own_bodies_here() -> None:
    async with three_workers():
        decoder = await RemoteModule("b", Codec).typed(Decoder)
        assert isinstance(decoder, Decoder)
        assert await decoder.words(X) == ["0.0", "1.0", "2.0"]
        assert await decoder.text(X) == "0.0 1.0 2.0 at a"


async def test_typed_calls_are_differentiable() -> None:
    async with three_workers():
        encoder = await RemoteModule("b", Codec).typed(Encoder)
        x = X.clone().requires_grad_()
        async with context() as ctx:
            await backward(ctx, [(await encoder.encode(x, scale=3.0)).sum()])
            assert get_gradients(ctx)[x].tolist() == [6.0] * 3


async def use(encoder: Encoder, x: torch.Tensor) -> tuple[torch.Tensor, str]:
    """Use a typed module that came in a call."""
    return await encoder.encode(x), await encoder.where()


async def test_typed_module_travels_in_calls() -> None:
    async with three_workers() as (a, _, _):
        encoder = await RemoteModule("b", Codec).typed(Encoder)
        for name in "bc":
            output, where = await a.peer(name).call(use, encoder, X)
            assert (output.tolist(), where) == ([0.0, 2.0, 4.0], "b")


async def test_typed_module_travels_between_processes() -> None:
    async with processes("b") as worker:
        with acting_as(worker):
            encoder = await RemoteModule("b", Codec).typed(Encoder)
            output, where = await worker.peer("b").call(use, encoder, X)
            assert (output.tolist(), where) == ([0.0, 2.0, 4.0], "b")
            del encoder


async def test_run_method_takes_a_name() -> None:
    async with three_workers():
        module = RemoteModule("b", Codec)
        encoded = await module.run_method("encode", [X], {"scale": 3.0})
        assert encoded[2].item() == 12.0
        with pytest.raises(AttributeError, match="decipher"):
            await module.run_method("decipher")


class Missing(Protocol):
    async def decipher(self, x: torch.Tensor) -> torch.Tensor: ...


class NeedsMore(Protocol):
    async def encode(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor: ...


class OtherKeyword(Protocol):
    async def encode(self, x: torch.Tensor, *, speed: float) -> torch.Tensor: ...


class NeedsLess(Protocol):
    async def words(self) -> list[str]: ...


@pytest.mark.parametrize(
    ("interface", "problem"),
    [
        (Missing, "not a Missing: Codec has no method 'decipher'"),
        (NeedsMore, r"Codec\.encode\(x.*too many positional"),
        (OtherKeyword, r"unexpected keyword argument 'speed'"),
        (NeedsLess, r"Codec\.words\(x.* missing a required argument: 'x'"),
    ],
)
async def test_owner_names_the_missing_methods(interface: Any, problem: str) -> None:
    async with three_workers():
        module = RemoteModule("b", Codec)
        with pytest.raises(UsageError, match=problem):
            await module.typed(interface)


class Plain(Protocol):
    def encode(self, x: torch.Tensor) -> torch.Tensor: ...


class Empty(Protocol):
    pass


@pytest.mark.parametrize("interface", [Codec, Empty, 3, use])
async def test_invalid_interface_is_refused(interface: Any) -> None:
    async with three_workers():
        with pytest.raises(UsageError, match="interface must be an abstract class"):
            await RemoteModule("b", Codec).typed(interface)


async def test_interface_methods_must_be_declared_as_used() -> None:
    async with three_workers():
        with pytest.raises(UsageError, match=r"Plain\.encode is not `async def`"):
            await RemoteModule("b", Codec).typed(Plain)


def broken() -> nn.Module:
    raise ArithmeticError("no such codec")


async def test_failed_construction_is_explained() -> None:
    async with three_workers():
        with pytest.raises(ArithmeticError, match="no such codec"):
            await RemoteModule("b", broken).typed(Encoder)
