"""What members of a cluster ask one another: to meet, end or stay, and what they are.

A program that attaches itself meets workers, and the workers of other programs.  Only
the members of a cluster have this service: a worker that something else has started
refuses the question, and counts as a worker.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

from asyncrpc import extend
from asyncrpc.core.worker import Worker
from asyncrpc.errors import AsyncRpcError, UsageError

SERVICE: Final = "cluster"
FIND_S: Final = 5.0  # for workers that have just started


@extend.message(SERVICE, "end", by=extend.MEMBERS, about="the receiver")
class EndWorker(extend.Request[None]):
    """Ask a worker to end, as its program would."""


@extend.message(SERVICE, "stay", by=extend.MEMBERS, about="the receiver")
class StayWorker(extend.Request[None]):
    """Ask a worker to outlive its program.

    Attributes:
        others: that stay as well, some of them.  It connects to them first: news of the
            program may not have reached them, and will not if the program is killed.
    """

    others: list[str]


@extend.message(SERVICE, "meet", by=extend.MEMBERS, about="the receiver")
class MeetWorkers(extend.Request[None]):
    """Ask a worker to learn of others, of which news may not have come yet."""

    others: list[str]


@extend.message(SERVICE, "is_program", about="the receiver")
class AskIsProgram(extend.Request[bool]):
    """Ask a member whether it is the worker of a program with a `Cluster`."""


class ClusterService:
    """Of a worker of a cluster, or of its program."""

    name = SERVICE

    def __init__(
        self,
        host: extend.ServiceHost,
        end: Callable[[], None] | None = None,
        stay: Callable[[], None] | None = None,
        *,
        cluster: Any = None,
    ) -> None:
        """Take what can be asked; a program can neither be ended nor kept.

        Args:
            cluster: of the worker of a program.
        """
        self._host = host
        self.cluster = cluster
        self.routes = (
            extend.answers(EndWorker, self._on_end),
            extend.answers(StayWorker, self._on_stay),
            extend.answers(MeetWorkers, self._on_meet),
            extend.answers(AskIsProgram, self._on_is_program),
        )
        self._end, self._stay = end, stay

    async def _on_end(self, _: extend.PeerLink, __: EndWorker) -> None:
        _checked(self._end)()

    async def _on_stay(self, link: extend.PeerLink, request: StayWorker) -> None:
        stay = _checked(self._stay)
        # The program may be killed before news of them comes.
        await self._on_meet(link, MeetWorkers(request.others))
        for name in request.others:
            await is_program(self._host, name)  # any question will do
        stay()

    async def _on_meet(self, _: extend.PeerLink, request: MeetWorkers) -> None:
        for name in request.others:
            with suppress(AsyncRpcError):  # it is lost again
                await self._host.find_member(name, FIND_S)

    async def _on_is_program(self, _: extend.PeerLink, __: AskIsProgram) -> bool:
        return self._end is None

    def on_peer_lost(self, peer: extend.WorkerId, reason: str) -> None:
        """Nothing is held for a peer."""

    async def close(self) -> None:
        """Nothing to release."""


def cluster_of(worker: Worker) -> Any:
    """Return the `Cluster` whose program's worker this is; None: it is no such."""
    service = extend.host_of(worker).find_service(ClusterService)
    return None if service is None else service.cluster


def _checked(act: Callable[[], None] | None) -> Callable[[], None]:
    if act is None:
        raise UsageError("this is the worker of a program: only that program ends it")
    return act


async def is_program(host: extend.ServiceHost, name: str) -> bool:
    """Return whether a member is the worker of a program with a `Cluster`."""
    try:
        return await extend.ask(await host.link_to(name), AskIsProgram())
    except AsyncRpcError:
        return False  # it has no such service, or is gone again
