"""A call whose deadline passed while it waited for a thread does not run."""

from __future__ import annotations

import threading

import pytest

from asyncrpc import Options, expose
from asyncrpc.errors import DeadlineExceededError
from asyncrpc.testing import Cluster

let_go = threading.Event()
ran: list[int] = []


@expose
def hold(number: int) -> int:
    ran.append(number)
    let_go.wait()
    return number


async def test_it_never_runs() -> None:
    let_go.clear()
    ran.clear()
    async with Cluster(2, options=Options(threads=1)) as (a, b):
        peer = a.peer("b")
        first = a.parts.start_call("b", hold, (1,))
        with pytest.raises(DeadlineExceededError):
            # Before the worker starts a thread because no call ends.
            await peer.using(timeout_s=0.02).call(hold, 2)
        last = a.parts.start_call("b", hold, (3,))  # behind the second one
        let_go.set()
        assert [await first, await last] == [1, 3]
        assert b.parts.pool.unfinished == 0
    assert sorted(ran) == [1, 3]  # at once, if the worker has started one more thread
