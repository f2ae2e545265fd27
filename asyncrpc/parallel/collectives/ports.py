"""What collectives need of their worker."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from asyncrpc.core.ids import WorkerInfo
from asyncrpc.core.options import Options
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.trace.recorder import FlightRecorder
from asyncrpc.extend import Incarnation, PeerLink, WorkerId

T = TypeVar("T")


class Directory(Protocol):
    """The links that are open, and the workers that are known."""

    def link_to(self, name: str, /) -> PeerLink | None:
        """Return the open link to a worker."""

    def known_incarnation(self, name: str, /) -> Incarnation | None:
        """Return the life of a worker that is known; None if no worker has the name."""


class Members(Protocol):
    """The members of the worker's own group, as far as they are known."""

    @property
    def known(self) -> list[WorkerInfo]:
        """Every member that is there; this worker included."""

    def find(self, name: str, timeout_s: float, /) -> Awaitable[None]:
        """Ask others about a worker that this one does not know."""


class GroupWorker(Scheduler, Protocol):
    """A worker, as far as its groups need it.

    Attributes:
        recorder: keeps how collectives end.
    """

    options: Options
    recorder: FlightRecorder

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def id(self) -> WorkerId:
        """Its name and incarnation."""

    @property
    def rank(self) -> int:
        """Its rank among all workers; -1: it has none."""

    @property
    def membership(self) -> Members:
        """The members that this worker knows."""

    @property
    def is_draining(self) -> bool:
        """Return whether it shuts down, and connects to no others."""

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can reach it."""

    @property
    def directory(self) -> Directory:
        """The other workers."""

    def link_to(self, name: str, /) -> Awaitable[PeerLink]:
        """Return the link to a worker, connecting if need be."""

    def run_on_host(self, job: Callable[[], T], /) -> asyncio.Future[T]:
        """Run `job`, which touches no device, in a thread; called on the loop."""
