"""Futures of `rpc_async`, completed with the end of a call."""

import asyncio
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from asyncrpc.compat.rpc.promises import Promise


class HereAtOnce:
    """An agent whose jobs run where they are given."""

    def in_thread(self, job: Callable[[], Any], /) -> None:
        job()

    def rank_of(self, name: str, /) -> int:
        raise LookupError(name)


async def completed(limit_s: float | None) -> Any:
    call: Any = asyncio.get_running_loop().create_future()
    promise = Promise(HereAtOnce(), lambda: call, limit_s)
    promise.begin()
    call.set_result(7)
    await asyncio.sleep(0)  # its callbacks run
    return promise.future.value()


@pytest.mark.parametrize("limit_s", [None, 3600.0])
async def test_result_within_the_limit_completes_the_future(
    limit_s: float | None,
) -> None:
    assert await completed(limit_s) == 7


async def test_result_after_the_limit_is_a_timeout() -> None:
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        await completed(1e-9)


async def test_call_that_cannot_start_fails_its_future() -> None:
    def refuse() -> Any:
        raise ValueError("the arguments cannot travel")

    promise = Promise(HereAtOnce(), refuse)
    promise.begin_or_fail()
    with pytest.raises(ValueError, match="cannot travel"):
        promise.future.wait()


async def test_arguments_are_released_when_the_call_begins() -> None:
    class Argument:
        pass

    call: Any = asyncio.get_running_loop().create_future()
    argument = Argument()
    seen = weakref.ref(argument)
    promise = Promise(HereAtOnce(), partial(lambda _argument: call, argument))
    del argument
    promise.begin()
    assert seen() is None
