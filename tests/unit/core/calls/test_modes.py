"""Where functions run, by what they are; what runs on the loop is small and listed."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest
import torch

from asyncrpc.core.calls.inline import is_listed, is_short
from asyncrpc.core.calls.modes import Mode, mode_of
from asyncrpc.core.torch_modes import has_torchs_kernels


async def _echo(value: Any) -> Any:
    return value


async def _waits(value: Any) -> Any:
    return await _echo(value)


async def _waits_inside(values: Any) -> Any:
    return [await _echo(value) for value in values]


async def _waits_by_with(lock: asyncio.Lock) -> None:
    async with lock:
        pass


def _pretends(value: Any) -> Any:
    return _waits(value)


class _Callable:
    async def __call__(self, value: Any) -> Any:
        return value


@pytest.mark.parametrize(
    ("function", "mode"),
    [
        (_echo, Mode.ONE_STEP),
        (functools.partial(_echo, 1), Mode.ONE_STEP),
        (_Callable(), Mode.ONE_STEP),
        (_Callable().__call__, Mode.ONE_STEP),
        (_waits, Mode.COROUTINE),
        (functools.partial(_waits, 1), Mode.COROUTINE),
        (functools.wraps(_echo)(_waits), Mode.COROUTINE),
        (_waits_inside, Mode.COROUTINE),
        (_waits_by_with, Mode.COROUTINE),
        (_pretends, Mode.THREAD),
    ],
)
def test_mode_of_a_function_follows_from_its_kind(function: Any, mode: Mode) -> None:
    assert mode_of(function) is mode


SMALL = torch.ones(1024)
KIB = 1 << 10


@pytest.mark.parametrize("function", [torch.add, torch.Tensor.add, torch.sum, torch.eq])
def test_elementwise_functions_and_reductions_are_listed(function: Any) -> None:
    assert is_listed(function)


@pytest.mark.parametrize(
    "function",
    [
        *(torch.matmul, torch.ones, torch.sort, torch.load, torch.linalg.inv),
        *(len, [].append),
    ],
)
def test_other_functions_are_not_listed(function: Any) -> None:
    assert not is_listed(function)


@pytest.mark.parametrize(
    ("args", "cheap"),
    [
        ((SMALL, 1), True),
        ((SMALL, SMALL), True),
        ((SMALL, torch.ones(())), True),
        ((torch.ones(4096),), True),
        ((torch.ones(4097),), False),
        ((torch.ones(2048), torch.ones(2049)), False),
        ((torch.ones(1, 1000), torch.ones(1000, 1)), False),  # a million elements
        ((SMALL.clone().requires_grad_(),), False),
        ((torch.nn.Parameter(SMALL),), False),
        ((SMALL.to("meta"),), False),
        ((SMALL, "x"), False),
        ((SMALL, [1]), False),
    ],
)
def test_short_calls_have_few_elements_and_no_gradient(
    args: tuple[Any, ...], *, cheap: bool
) -> None:
    assert is_short(args, 16 * KIB) is cheap


def test_vmap_registers_no_kernel_that_replaces_one_of_the_host() -> None:
    torch.func.vmap(torch.add, (0, None))(SMALL, torch.ones(()))
    assert has_torchs_kernels()
