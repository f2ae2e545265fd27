"""The services of a worker: parts that talk to the same parts of its peers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from asyncrpc.errors import MalformedError
from asyncrpc.ids import Incarnation, WorkerId
from asyncrpc.runtime.extensions import (
    HoldsForPeers,
    RemembersLost,
    Service,
    WantsAddresses,
)
from asyncrpc.runtime.router import Router

# Makers of the services by which observers look at a worker.  The package that has them
# adds to this at import, for workers that are made by packages below it.
OBSERVATION: Final[list[Callable[[Any], Service]]] = []


class Services:
    """The services of one worker, by name.

    Attributes:
        router: leads messages to them.
    """

    def __init__(self) -> None:
        self.router = Router()
        self._by_name: dict[str, Service] = {}
        self._holders: list[HoldsForPeers] = []

    def __iter__(self) -> Iterator[Service]:
        """Iterate over them in the order in which they were added."""
        return iter(tuple(self._by_name.values()))

    def add(self, service: Service) -> None:
        """Let other workers send messages to a part of this one."""
        self._by_name[service.name] = service
        self.router.add(service.name, service.routes)
        if isinstance(service, HoldsForPeers):
            self._holders.append(service)

    def named(self, name: Any) -> Service:
        """Return the service with this name.

        Raises:
            MalformedError: no service has this name: the peer speaks another dialect.
        """
        found = self._by_name.get(name) if type(name) is str else None
        if found is None:
            raise MalformedError(f"there is no service {name!r:.80}")
        return found

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes the services keep for a peer."""
        return sum(service.held_for(peer) for service in self._holders)

    def on_listening(self, addresses: Sequence[str]) -> None:
        """Tell the services that want the addresses where the worker listens."""
        for service in self:
            if isinstance(service, WantsAddresses):
                service.on_listening(addresses)

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Tell every service that a peer is gone."""
        for service in self:
            service.on_peer_lost(peer, reason)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Tell every service that a lost peer is back."""
        for service in self:
            if isinstance(service, RemembersLost):
                service.on_peer_back(peer)
