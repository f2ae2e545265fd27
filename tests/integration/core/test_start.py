"""A worker serves nobody before it knows everybody."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import asyncrpc
from asyncrpc import LocalRendezvous, Worker
from asyncrpc.core.membership.rendezvous import Member
from tests.inner_state import early_dials


class LateForOne:
    """A meeting whose result reaches one worker only when the test says so."""

    def __init__(self, late: str) -> None:
        self.world_size = 2
        self.released = asyncio.Event()
        self._late = late
        self._meeting = LocalRendezvous(2)

    async def join(self, member: Member, timeout_s: float) -> Sequence[Member]:
        members = await self._meeting.join(member, timeout_s)
        if member.name == self._late:
            await self.released.wait()
        return members

    async def leave(self, timeout_s: float) -> None:
        await self._meeting.leave(timeout_s)


async def known() -> list[str]:
    worker = asyncrpc.current_worker()
    return [member.name for member in worker.parts.directory.members]


async def test_a_call_waits_for_a_callee_that_is_still_starting() -> None:
    meeting = LateForOne("b")
    b = Worker("b", rank=1, rendezvous=meeting)
    starting = asyncio.ensure_future(b.__aenter__())
    async with Worker("a", rank=0, rendezvous=meeting) as a:
        call = asyncio.ensure_future(a.peer("b").call(known))
        while not early_dials(b.parts.directory):  # noqa: ASYNC110  (nothing tells of a dial)
            await asyncio.sleep(0.001)
        assert not call.done()
        meeting.released.set()
        await starting
        assert await call == ["a", "b"]
        await b.shutdown()
