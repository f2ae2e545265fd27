"""Carries the state of replicas to their routers: a service of the worker.

A worker has one, made when its program first enters a `Replica` or a `Replicas`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from asyncrpc.errors import AsyncRpcError
from asyncrpc.extend import Incarnation, PeerLink, ServiceHost, WorkerId, answers
from asyncrpc.serving.replicas.messages import (
    SERVICE,
    ReplicaNews,
    ReplicaStatement,
    WatchReplica,
)

if TYPE_CHECKING:
    from asyncrpc.serving.replicas.replica import Replica
    from asyncrpc.serving.replicas.router import ReplicaRouter

logger = logging.getLogger("asyncrpc")


class ReplicaService:
    """Tells routers the state of this worker, and takes the state of other replicas.

    Attributes:
        statement: returns the state of this worker; None: it is not a replica.
        replica: the replica of this worker; None: it is not a replica.
    """

    name = SERVICE

    def __init__(self) -> None:
        self.routes = (
            answers(WatchReplica, self._on_watch),
            answers(ReplicaNews, self._on_news),
        )
        self.statement: Callable[[], ReplicaStatement] | None = None
        self.replica: Replica | None = None
        self._watchers: dict[Incarnation, PeerLink] = {}  # no more than links
        self._listeners: list[ReplicaRouter] = []

    def listen(self, listener: ReplicaRouter) -> None:
        """Pass the news of all watched replicas to a router."""
        self._listeners.append(listener)

    def unlisten(self, listener: ReplicaRouter) -> None:
        """Stop passing news to a router."""
        self._listeners.remove(listener)

    def tell_watchers(self) -> list[asyncio.Future[Any]]:
        """Tell all watching routers the state of this worker; return their answers."""
        if self.statement is None:
            return []
        statement, answers_ = self.statement(), []
        for link in self._watchers.values():
            try:
                answer = link.ask(ReplicaNews(statement))
            except AsyncRpcError:  # the router is leaving
                continue
            answer.add_done_callback(_forget)
            answers_.append(answer)
        return answers_

    async def _on_watch(
        self, link: PeerLink, _: WatchReplica
    ) -> ReplicaStatement | None:
        self._watchers[link.peer.incarnation] = link
        if self.statement is None:
            return None
        statement = self.statement()
        # Without the load of this question.
        return statement._replace(load=max(statement.load - 1, 0.0))

    async def _on_news(self, link: PeerLink, news: ReplicaNews) -> None:
        peer, statement = link.peer, news.statement
        listeners = tuple(self._listeners)
        await asyncio.gather(
            *(listener.on_news(peer, statement) for listener in listeners)
        )

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Forget a router that is gone."""
        self._watchers.pop(peer.incarnation, None)

    async def close(self) -> None:
        """Do nothing: nothing is held."""


def _forget(answer: asyncio.Future[Any]) -> None:
    """Mark the error of an answer as read: a router that is gone needs no news."""
    if not answer.cancelled():
        answer.exception()


def service_of(host: ServiceHost) -> ReplicaService:
    """Return the service of a worker; make it if the worker has none."""
    service = host.find_service(ReplicaService)
    if service is None:
        service = ReplicaService()
        host.add_service(service)
    return service
