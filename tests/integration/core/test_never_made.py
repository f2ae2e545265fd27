"""A value that is never made leaves nothing behind, whatever its creator holds."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from asyncrpc import Worker
from asyncrpc.core.wire.frames import Hello
from asyncrpc.errors import EncodeError


def numbers() -> Iterator[int]:
    yield 1


def try_to_make(worker: Worker, value: Any) -> None:
    """Start a call that cannot be sent, with a reference to what is to come."""
    with pytest.raises(EncodeError, match="cannot be sent"):
        worker.peer("b").remote(len, value)


@pytest.mark.parametrize("value", [numbers(), torch.ones([1] * 65), threading.Lock()])
async def test_unsendable_value_keeps_no_reference(a: Worker, value: Any) -> None:
    assert await a.peer("b").call(len, "ab") == 2
    for _ in range(3):
        try_to_make(a, value)
    assert await a.peer("b").call(len, "ab") == 2  # what is noted has been seen to
    gc.collect()
    assert await a.peer("b").call(len, "ab") == 2
    assert a.rrefs() == []


class Large:
    """Stands for what is large: it should go when nobody uses it."""

    def __reduce__(self) -> Any:
        raise ValueError("cannot be written")


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Nothing is freed but what nobody refers to."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def test_unsendable_value_is_freed_now(a: Worker, no_collector: None) -> None:
    assert await a.peer("b").call(len, "ab") == 2
    value = Large()
    seen = weakref.ref(value)
    try_to_make(a, value)
    del value
    assert await a.peer("b").call(len, "ab") == 2
    assert seen() is None


async def test_peer_introduced_in_time_is_not_dropped(a: Worker) -> None:
    """The time may be over in the very turn of the loop in which it is known."""
    connection: Any = a.parts.directory.accept()
    connection.opened.set_result(Hello("z", 1, -1, 1, "a", 0, ""))
    a.parts.directory.admission._expire(connection)  # noqa: SLF001  (the timer's turn)
    assert not connection.ended.done()
    assert not a.counters.connections_dropped_unauthenticated
    await asyncio.sleep(0)  # that it has introduced itself is noted
    assert not len(a.parts.directory.admission)
