"""A block that ends when its client leaves, and what it has no part in."""

from __future__ import annotations

import asyncio

import pytest

from asyncrpc.serving.request_scope import ClientScope, beside


async def test_block_ends_when_its_client_leaves() -> None:
    client = ClientScope()
    has_ended = False
    async with client:
        asyncio.get_running_loop().call_soon(client.leave)
        try:
            await asyncio.Event().wait()
        finally:
            has_ended = True
    assert has_ended
    assert client.has_left
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)  # nothing is left that would cancel this


async def test_late_departure_of_a_client_cancels_nothing() -> None:
    client = ClientScope()
    async with client:
        pass
    client.leave()
    await asyncio.sleep(0)
    assert not client.has_left


async def test_second_departure_changes_nothing() -> None:
    client = ClientScope()
    async with client:
        asyncio.get_running_loop().call_soon(client.leave)
        asyncio.get_running_loop().call_soon(client.leave)
        await asyncio.Event().wait()
    await asyncio.sleep(0)


async def wait_in(client: ClientScope, begun: asyncio.Event) -> None:
    async with client:
        begun.set()
        await asyncio.Event().wait()


async def fail_in(client: ClientScope) -> None:
    async with client:
        asyncio.get_running_loop().call_soon(client.leave)
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("of the block")


async def test_foreign_cancellation_passes_through() -> None:
    """Also one that comes in the same turn."""
    for leaves in (False, True):
        client, begun = ClientScope(), asyncio.Event()
        task = asyncio.create_task(wait_in(client, begun))
        await begun.wait()
        if leaves:
            client.leave()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_error_of_the_block_passes_through() -> None:
    with pytest.raises(ValueError, match="of the block"):
        await fail_in(ClientScope())


async def test_nested_scopes_end_separately() -> None:
    outer, inner = ClientScope(), ClientScope()
    reached: list[str] = []
    async with outer:
        async with inner:
            asyncio.get_running_loop().call_soon(inner.leave)
            asyncio.get_running_loop().call_soon(outer.leave)
            await asyncio.Event().wait()
        reached.append("after the inner one")
    assert reached == []
    await asyncio.sleep(0)


async def test_companion_task_ends_with_its_block() -> None:
    ended: list[str] = []

    async def run() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("beside")

    async with beside(run()):
        await asyncio.sleep(0)
    assert ended == ["beside"]


async def test_error_of_a_companion_task_is_not_that_of_the_block() -> None:
    async def fail() -> None:
        raise ValueError("beside")

    async with beside(fail()):
        await asyncio.sleep(0)
