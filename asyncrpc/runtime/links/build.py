"""Builds the directory of a worker from what the worker has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from asyncrpc.ids import WorkerId
from asyncrpc.runtime.counters import Counters
from asyncrpc.runtime.links.connections import Connections, ConnectionSettings
from asyncrpc.runtime.links.directory import Directory
from asyncrpc.runtime.links.liveness import ShowsWorker
from asyncrpc.runtime.links.ports import DirectoryLink, PeerObserver
from asyncrpc.runtime.options import Options
from asyncrpc.runtime.ports import Identity, Scheduler
from asyncrpc.runtime.spinning import Spinner
from asyncrpc.transport.abc import Connector

LinkT = TypeVar("LinkT", bound=DirectoryLink)


class MakesBuffers(Protocol):
    """Has memory for payloads that arrive."""

    def make(self, nbytes: int, /) -> memoryview:
        """Return memory for so many bytes."""


class DirectoryOwner(Identity, Scheduler, PeerObserver, Protocol):
    """What a worker gives to the parts of its directory.

    No part is given all of it: each takes what it needs.
    """

    options: Options
    counters: Counters

    @property
    def receive_pool(self) -> MakesBuffers:
        """Memory for payloads that arrive."""

    @property
    def spinner(self) -> Spinner | None:
        """Polls for what comes after a write, if the worker wants that."""

    @property
    def sidecar(self) -> ShowsWorker:
        """Lets peers see that the worker runs."""

    @property
    def secret_for_connections(self) -> bytes | None:
        """The secret that both ends of a connection must prove to know."""

    def random_bytes(self, count: int) -> bytes:
        """Return bytes that nobody can foresee."""


def build_directory(
    owner: DirectoryOwner,
    connectors: Mapping[str, Connector],
    make_link: Callable[[WorkerId, Any], LinkT],
) -> Directory[LinkT]:
    """Return the directory of a worker, in which nobody is known yet.

    Args:
        owner: the worker.
        connectors: by scheme; they may come later.
        make_link: makes a link to a peer over a connection.
    """
    settings = ConnectionSettings(
        owner.secret_for_connections,
        owner.options.limits,
        owner.receive_pool.make,
        owner.random_bytes,
        owner.spinner,
    )
    return Directory(
        owner,
        owner,
        owner.counters,
        owner.options,
        connections=Connections(owner, owner.loop, settings),
        connectors=connectors,
        make_link=make_link,
        peers=owner,
        sidecar=owner.sidecar,
    )
