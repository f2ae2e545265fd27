"""Where functions run, by what they are."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from asyncrpc.core.calls.modes import Mode, mode_of


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
