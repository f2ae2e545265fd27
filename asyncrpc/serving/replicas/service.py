"""What workers say of themselves as replicas, and who listens: a service of the worker.

One for a worker, made when its program first enters a `Replica` or a `Replicas`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Protocol

from asyncrpc.ids import Incarnation, WorkerId
from asyncrpc.runtime.parts import Parts
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.router import answers, takes
from asyncrpc.serving.replicas.messages import (
    SERVICE,
    ReplicaNews,
    ReplicaStatement,
    WatchReplica,
)

logger = logging.getLogger("asyncrpc")


class HearsReplicas(Protocol):
    """Takes the news of replicas."""

    def on_news(self, peer: WorkerId, statement: ReplicaStatement) -> None:
        """A replica has told how it is now."""


class Drains(Protocol):
    """A replica, as far as its end goes."""

    async def drain(self, timeout_s: float | None = None) -> bool:
        """Take no further calls, and wait until none runs here."""


class ReplicaService:
    """Tells the routers that watch this worker how it is, and hears others.

    Attributes:
        routes: of its messages.
        statement: returns what this worker says of itself; None: it says nothing.
        replica: that says it; None: there is none.
    """

    name = SERVICE

    def __init__(self) -> None:
        """Begin without routers, and with nothing to say."""
        self.routes = (
            answers(WatchReplica, self._on_watch),
            takes(ReplicaNews, self._on_news),
        )
        self.statement: Callable[[], ReplicaStatement] | None = None
        self.replica: Drains | None = None
        self._watchers: dict[Incarnation, PeerLink] = {}  # no more than links
        self._listeners: list[HearsReplicas] = []

    def listen(self, listener: HearsReplicas) -> None:
        """Tell a router the news of all replicas that it watches."""
        self._listeners.append(listener)

    def unlisten(self, listener: HearsReplicas) -> None:
        """Tell it no more."""
        self._listeners.remove(listener)

    def tell_watchers(self) -> None:
        """Tell all routers that watch this worker how it is now."""
        if self.statement is None:
            return
        news = ReplicaNews(self.statement())
        for link in self._watchers.values():
            if not link.is_lost:
                link.tell(news)

    async def _on_watch(
        self, link: PeerLink, _: WatchReplica
    ) -> ReplicaStatement | None:
        self._watchers[link.peer.incarnation] = link
        if self.statement is None:
            return None
        found = self.statement()
        return found._replace(load=max(found.load - 1, 0.0))  # this question's own

    def _on_news(self, link: PeerLink, news: ReplicaNews) -> None:
        for listener in tuple(self._listeners):
            listener.on_news(link.peer, news.statement)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Forget a router that is gone."""
        self._watchers.pop(peer.incarnation, None)

    async def close(self) -> None:
        """Do nothing: nothing is held."""


def service_of(parts: Parts) -> ReplicaService:
    """Return the service of a worker; make it if there is none."""
    for service in parts.services:
        if isinstance(service, ReplicaService):
            return service
    made = ReplicaService()
    parts.services.add(made)
    return made
