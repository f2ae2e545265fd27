"""Peers that are only known: links keep what is sent, and a test ends their dials."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.members import Member
from asyncrpc.core.services.schema import Notice, Request
from asyncrpc.core.wire.frames import Hello
from asyncrpc.errors import UnknownWorkerError
from asyncrpc.testing.loop import SimLoop

T = TypeVar("T")


def run(main: Coroutine[object, object, T]) -> T:
    """Run a coroutine in virtual time."""
    with asyncio.Runner(loop_factory=SimLoop) as runner:
        return runner.run(main)


class KeepingLink:
    """A link that keeps what it is given, and answers what it was told to.

    Attributes:
        sent: service, method and value of each message.
        answers: to requests, by method.
    """

    def __init__(self, peer: WorkerId) -> None:
        self.peer = peer
        self.is_guest = self.is_lost = self.is_draining = False
        self.connection: Any = None
        self.sent: list[tuple[str, str, Any]] = []
        self.answers: dict[str, Any] = {}

    def check_room(self, nbytes: int) -> None:
        """There is room for anything."""

    def tell(self, notice: Notice, *, at_once: bool = False) -> None:
        del at_once
        self.sent.append((notice.service, notice.method, notice.pack()))

    def ask(self, request: Request[Any], **_how: Any) -> asyncio.Future[Any]:
        self.sent.append((request.service, request.method, request.pack()))
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if request.method in self.answers:
            answer.set_result(self.answers[request.method])
        return answer


class KnownPeer:
    """What is known of one worker."""

    def __init__(self, member: Member) -> None:
        self.member = member
        self.link: KeepingLink | None = None
        self.new_link = KeepingLink(WorkerId(member.name, member.incarnation))
        self.dialed = asyncio.Event()
        self.error: Exception | None = None


class Company:
    """Some workers, by rank and name; the first is the one that is tested.

    It is its scheduler and its identity, too.
    """

    def __init__(self, *names: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.known = [
            KnownPeer(Member(name, rank, Incarnation(rank + 1), (f"mem://{name}",)))
            for rank, name in enumerate(names)
        ]
        self.name, self.rank, self.world_size = names[0], 0, len(names)
        self.incarnation = Incarnation(1)
        self.tasks: set[asyncio.Task[Any]] = set()

    # --- Scheduler ------------------------------------------------------------------

    @property
    def id(self) -> WorkerId:
        return WorkerId(self.name, self.incarnation)

    def hello(self, **fields: Any) -> Hello:
        return Hello(self.name, self.incarnation, self.rank, 1, **fields)

    def start_task(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        context: contextvars.Context | None = None,
    ) -> asyncio.Task[T]:
        task = self.loop.create_task(coroutine, context=context)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    # --- Peers -----------------------------------------------------------------------

    @property
    def links(self) -> list[KeepingLink]:
        return [peer.link for peer in self.known if peer.link is not None]

    def member(self, to: str | int) -> Member:
        return self.find(to).member

    def find(self, to: str | int) -> KnownPeer:
        for peer in self.known:
            if to in (peer.member.name, peer.member.rank):
                return peer
        raise UnknownWorkerError(to, [peer.member.name for peer in self.known])

    def link_of(self, incarnation: Incarnation) -> KeepingLink | None:
        matches = (link for link in self.links if link.peer.incarnation == incarnation)
        return next(matches, None)

    async def open_link(self, to: str | int) -> KeepingLink:
        """Return the link once the test lets the dial end."""
        peer = self.find(to)
        if peer.link is None:
            await peer.dialed.wait()
            if peer.error is not None:
                raise peer.error
            peer.link = peer.new_link
        return peer.link

    def known_incarnation(self, name: str) -> Incarnation | None:
        return self.member(name).incarnation

    def add(self, members: Iterable[Member]) -> None:
        for member in members:
            self.find(member.name).member = member

    def give_rank(self, rank: int, name: str) -> None:
        assert self.member(name).rank == rank

    def forget(self, name: str) -> None:
        self.known.remove(self.find(name))

    def connect(self, *names: str) -> None:
        """Let there be links."""
        for name in names:
            peer = self.find(name)
            peer.link = peer.new_link
            peer.dialed.set()

    def fail(self, name: str, error: Exception) -> None:
        """Let the dial to a peer fail."""
        peer = self.find(name)
        peer.error = error
        peer.dialed.set()

    async def settle(self) -> None:
        """Let everything happen that can, now."""
        for _ in range(20):
            await asyncio.sleep(0)
