"""A look at the group from within one of its workers, over its own links.

It begins with the worker itself.  It goes on to the workers that are waited for, and to
the callers of what is served here; it looks at all workers only on request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any, Final, TypeVar

from asyncrpc.core.links.directory import Directory
from asyncrpc.core.loop.threads import in_new_thread
from asyncrpc.core.members import Member
from asyncrpc.core.parts import Parts
from asyncrpc.extend import Request, ask
from asyncrpc.tools.inspection.ages import WaitAges
from asyncrpc.tools.inspection.collecting import snapshot_of
from asyncrpc.tools.inspection.group import GroupLook, GroupView
from asyncrpc.tools.inspection.machine.graph import AwaitGraph, Node, graph_of
from asyncrpc.tools.inspection.records import NO_ACTOR, ObservedActor, WorkerSnapshot

T = TypeVar("T")

WORKERS_MAX: Final = 64  # looked at, besides the worker itself
STEPS_MAX: Final = 16  # from worker to worker
LOOK_S: Final = 20.0  # for the whole look


class LinkQuestions:
    """Asks peers as a service of the worker does; an `AsksWorkers`."""

    def __init__(self, peers: Directory) -> None:
        self._peers = peers

    async def ask(self, member: Member, request: Request[T], *, timeout_s: float) -> T:
        """See `group.AsksWorkers`."""
        async with asyncio.timeout(timeout_s):
            link = await self._peers.open_link(member.name)
            return await ask(link, request)


class InnerLook:
    """One look from within a worker."""

    def __init__(
        self,
        peers: Directory,
        own: WorkerSnapshot,
        *,
        secret: bytes | None,
        in_thread: Callable[[Callable[[], Any]], Awaitable[Any]],
    ) -> None:
        self.own = own
        self._in_thread = in_thread
        questions = LinkQuestions(peers)
        self._look = GroupLook(questions, secret=secret, is_thorough=True)
        self._look.members = {member.name: member for member in peers.members}
        self._look.take(own)

    async def at_all(self) -> GroupView:
        """Look at all known workers, within limits."""
        await self._at(self._look.members)
        return self._look.view

    async def along(self, after_s: float) -> GroupView:
        """Look at the workers that waits here of at least `after_s` lead to."""
        known = self._look.members.keys()
        await self._at(
            {call.caller for call in self.own.served if call.for_s >= after_s}
        )
        for _ in range(STEPS_MAX):
            graph = await self._in_thread(lambda: self._look.view.graph)
            unseen = _unseen(graph, self.own.name, after_s) & known
            if not unseen or not await self._at(unseen):
                break
        return self._look.view

    async def _at(self, names: Iterable[str]) -> bool:
        """Look at the named workers; return whether any of them was new."""
        look = self._look
        seen = look.snapshots.keys() | look.silent.keys()
        room = max(0, WORKERS_MAX + 1 - len(seen))
        wanted = [name for name in names if name in look.members and name not in seen]
        await look.at(wanted[:room])
        return bool(wanted[:room])


def _unseen(graph: AwaitGraph, own: str, after_s: float) -> set[str]:
    """Return the unseen workers that long waits of one worker lead to."""
    ways = [node for node in graph.edges if _is_late(graph, node, own, after_s)]
    passed, unseen = set(ways), set[str]()
    while ways:
        for edge in graph.edges.get(ways.pop(), ()):
            to = edge.to
            if to.actor == NO_ACTOR and to.worker not in graph.snapshots:
                unseen.add(to.worker)
            elif to not in passed:
                passed.add(to)
                ways.append(to)
    return unseen - graph.troubles.keys()


def _is_late(graph: AwaitGraph, node: Node, own: str, after_s: float) -> bool:
    wait = graph.wait(node)
    return node.worker == own and wait is not None and wait.for_s >= after_s


def graph_of_seen(view: GroupView) -> AwaitGraph:
    """Return the graph of a look that did not reach all members.

    It is unknown whether the members that were not looked at have come, so the graph
    has no wait for them.
    """
    seen = view.snapshots.keys() | view.silent.keys()
    snapshots = [
        snapshot._replace(
            actors=tuple(_waiting_for(actor, seen) for actor in snapshot.actors)
        )
        for snapshot in view.snapshots.values()
    ]
    return graph_of(snapshots, view.silent)


def _waiting_for(actor: ObservedActor, seen: Collection[str]) -> ObservedActor:
    """Return an actor without its waits for members that were not seen."""
    if all(name in seen for name in actor.wait.members):
        return actor
    members = tuple(name for name in actor.wait.members if name in seen)
    return actor._replace(wait=actor.wait._replace(members=members))


async def inner_look(worker: Parts, ages: WaitAges) -> InnerLook:
    """Begin a look at the group from within a worker."""

    def take() -> WorkerSnapshot:
        return snapshot_of(worker, ages, is_thorough=True, blocked_for_s=0.0)

    own = await in_new_thread(worker.loop, take)
    return InnerLook(
        worker.directory,
        own,
        secret=worker.options.secret_bytes,
        in_thread=lambda job: in_new_thread(worker.loop, job),
    )
