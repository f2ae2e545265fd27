"""What a marked function returns is awaited, and its result is the call's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from asyncrpc import Options, RemoteError, Worker
from asyncrpc.testing import Cluster
from tests.integration.core import remote
from tests.integration.core.conftest import Trio
from tests.integration.core.remote import Elsewhere

FORMS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    "function": (remote.add_elsewhere, ("c", 2, 3), 5),
    "coroutine function": (remote.add_elsewhere_async, ("c", 2, 3), 5),
    "static method": (Elsewhere.static, ("c", 4), 5),
    "class method": (Elsewhere.of_class, ("c", 4), 13),
    "bound method": (Elsewhere(10).bound, ("c", 4), 14),
    "to the caller": (remote.add_elsewhere, ("a", 2, 3), 5),
    "to itself": (remote.add_elsewhere, ("b", 2, 3), 5),
    "chained": (remote.chained, (["c", "a", "b", "c"], 1), 2),
    "torch future": (remote.torch_future, (1,), 2),
    "concurrent future": (remote.concurrent_future, (1,), 2),
}


@pytest.mark.parametrize("form", FORMS)
async def test_call_returns_the_result_of_the_future(trio: Trio, form: str) -> None:
    function, args, expected = FORMS[form]
    assert await trio[0].peer("b").call(function, *args) == expected


async def test_reference_proxies_await_the_future(a: Worker) -> None:
    rref = a.peer("b").remote(Elsewhere, 5)
    assert await rref.rpc_async().bound("c", 1) == 6
    assert await rref.rpc_async().static("c", 1) == 2
    assert await rref.rpc_async().of_class("c", 1) == 10
    assert await rref.remote().bound("c", 2).to_here() == 7


async def test_remote_value_is_the_result_of_the_future(trio: Trio) -> None:
    rref = trio[0].peer("b").remote(remote.add_elsewhere, "c", 2, 3)
    assert await rref.to_here() == 5


async def test_result_without_a_future_is_explained(trio: Trio) -> None:
    with pytest.raises(RuntimeError, match=r"torch\.futures\.Future") as caught:
        await trio[0].peer("b").call(remote.no_future)
    assert isinstance(caught.value, RemoteError)
    assert "returned a int" in caught.value.remote_message


async def test_errors_reach_the_caller_at_once_and_later(trio: Trio) -> None:
    with pytest.raises(ValueError, match="at once"):
        await trio[0].peer("b").call(remote.raises_at_once)
    with pytest.raises(ValueError, match="later"):
        await trio[0].peer("b").call(remote.fails_later, "c")


async def test_pending_future_holds_no_thread() -> None:
    async with Cluster(3, options=Options(threads=1)) as (a, _, _):
        calls = [a.peer("b").call(remote.chained, ["c", "b"] * 4, i) for i in range(64)]
        assert await asyncio.gather(*calls) == list(range(1, 65))
