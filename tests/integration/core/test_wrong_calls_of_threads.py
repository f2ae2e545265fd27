"""What goes wrong with a call of another thread is told there, and not to the loop."""

from __future__ import annotations

import asyncio
import threading

import pytest

from asyncrpc import CallFuture, RRef
from asyncrpc.errors import EncodeError
from asyncrpc.testing import acting_as
from tests.integration.core.conftest import Trio


async def test_unsendable_remote_raises_in_its_thread(trio: Trio) -> None:
    peer = trio[0].peer("b")
    assert await peer.call(len, "ab") == 2
    rref: RRef[int] = await asyncio.to_thread(peer.remote, len, threading.Lock())
    for _ in range(2):
        with pytest.raises(EncodeError, match=r"args\[0\]"):
            await rref.to_here()
    rref.release()
    assert not trio[0].rrefs()


async def test_wait_accepts_huge_timeouts(trio: Trio) -> None:
    with acting_as(trio[0]):
        call: CallFuture[int] = trio[0].parts.start_call("b", len, ("ab",))
        for limit in (float("inf"), 1 << 70):
            assert await asyncio.to_thread(call.wait, limit) == 2
