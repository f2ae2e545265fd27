"""Futures of `rpc_async`, completed with the end of a call."""

import asyncio
from collections.abc import Callable
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
    promise = Promise(HereAtOnce(), limit_s)
    call: Any = asyncio.get_running_loop().create_future()
    promise.follow(call)
    call.set_result(7)
    await asyncio.sleep(0)  # its callbacks run
    return promise.future.value()


@pytest.mark.parametrize("limit_s", [None, 3600.0])
async def test_a_result_within_the_limit_is_the_futures(limit_s: float | None) -> None:
    assert await completed(limit_s) == 7


async def test_a_result_after_the_limit_is_a_timeout() -> None:
    with pytest.raises(RuntimeError, match="RPC ran for more than set timeout"):
        await completed(1e-9)
