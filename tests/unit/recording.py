"""Stands in for the rest of a worker, so that a part of it can be tested alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Coroutine, Iterable, Sequence
from contextvars import Context
from types import SimpleNamespace
from typing import Any, TypeVar

from asyncrpc.core.devices.maps import DeviceMap
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.loop.clock import Deadline
from asyncrpc.core.members import Member
from asyncrpc.core.services.router import Route
from asyncrpc.core.services.schema import Message, Notice, Request
from asyncrpc.errors import OverloadedError, UnknownWorkerError

T = TypeVar("T")


def worker(name: str) -> WorkerId:
    """Return a worker whose incarnation is made of its name."""
    return WorkerId(name, Incarnation(int.from_bytes(name.encode()[:8], "little")))


class RecordingLink:
    """A link that keeps what is sent; requests are answered by the test."""

    def __init__(self, peer: WorkerId) -> None:
        self.peer = peer
        self.is_guest = self.is_lost = self.is_draining = False
        self.room_bytes = sys.maxsize
        self.notices: list[Notice] = []
        self.asked: list[tuple[Request[Any], asyncio.Future[Any]]] = []

    def check_room(self, nbytes: int) -> None:
        if nbytes > self.room_bytes:
            raise OverloadedError("there is no room", retry_after_s=1.0)

    def tell(self, notice: Notice, *, at_once: bool = False) -> None:
        self.notices.append(notice)

    def ask(
        self,
        request: Request[Any],
        *,
        deadline: Deadline | None = None,
        device_map: DeviceMap | None = None,
    ) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((request, answer))
        return answer


class RecordingLinks:
    """The directory of a worker, which has links to some, and can get others."""

    def __init__(self, *linked: RecordingLink) -> None:
        self.open = {link.peer.incarnation: link for link in linked}
        self.reachable: dict[str, RecordingLink] = {}
        self.members: Sequence[Member] = ()

    def link_of(self, incarnation: Incarnation) -> RecordingLink | None:
        return self.open.get(incarnation)

    def known_incarnation(self, name: str) -> Incarnation | None:
        return {member.name: member.incarnation for member in self.members}.get(name)

    def link_to(self, name: str) -> Awaitable[RecordingLink]:
        async def get() -> RecordingLink:
            link = self.reachable.get(name)
            if link is None:
                raise UnknownWorkerError(name, self.reachable)
            self.open[link.peer.incarnation] = link
            return link

        return get()


def deliver(routes: Iterable[Route], link: RecordingLink, message: Message) -> Any:
    """Hand a message to its route, as the router does, and return what that does."""
    kind = isinstance(message, Request)
    (route,) = (
        declared
        for declared in routes
        if declared.method == message.method and declared.is_answered == kind
    )
    return route.handle(link, message.pack())


class LoopScheduler:
    """The loop of the test, and its tasks."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.tasks: list[asyncio.Task[Any]] = []

    def start_task(
        self, coroutine: Coroutine[Any, Any, T], *, context: Context | None = None
    ) -> asyncio.Task[T]:
        task = self.loop.create_task(coroutine, context=context)
        self.tasks.append(task)
        return task

    async def settle(self) -> None:
        """Let all tasks end."""
        while self.tasks:
            await self.tasks.pop()


def recording_parts(
    me: WorkerId, links: RecordingLinks, scheduler: LoopScheduler | None = None
) -> Any:
    """Return what a part that takes a worker's `Parts` needs of them."""
    parts = SimpleNamespace(
        id=me, directory=links, link_to=links.link_to, is_closed=False
    )
    if scheduler is not None:
        parts.loop, parts.start_task = scheduler.loop, scheduler.start_task
    return parts


async def let_run() -> None:
    """Let the loop run what is due, and what that makes due; nothing here waits."""
    for _ in range(10):
        await asyncio.sleep(0)
