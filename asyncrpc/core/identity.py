"""The identity of a worker, as its peers know it."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable

from asyncrpc.core.host.this_host import HOST_ID
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.members import Member
from asyncrpc.core.wire.frames import Hello


def _nowhere() -> tuple[str, ...]:
    return ()


class WorkerIdentity:
    """The name of a worker, this life of it, and its addresses.

    Attributes:
        name: unique among the workers that can reach one another.
        rank: index in the group; -1 if it has no rank.
        world_size: number of workers in the group; 0 if it is not fixed.
        incarnation: 64 random bits: this life of this worker.
        pid: of its process, for peers to show.
        host_id: of its host, for peers that may share memory with it.
        is_strict: whether it accepts no pickles.
        addresses_of: returns the addresses for others to reach it.
        sidecar_at: returns the addresses at which others ask whether its process runs.
        observes: whether it only looks at workers, and is not one itself.
    """

    def __init__(
        self, name: str, rank: int, world_size: int, *, is_strict: bool
    ) -> None:
        self.name = name
        self.rank = rank
        self.world_size = world_size
        self.incarnation = Incarnation(secrets.randbits(64) or 1)
        self.pid = os.getpid()
        self.host_id = HOST_ID
        self.is_strict = is_strict
        self.addresses_of: Callable[[], tuple[str, ...]] = _nowhere
        self.sidecar_at: Callable[[], tuple[str, ...]] = _nowhere
        self.observes = False

    @property
    def id(self) -> WorkerId:
        """This life of the worker."""
        return WorkerId(self.name, self.incarnation)

    @property
    def member(self) -> Member:
        """Return the worker's record for others."""
        return Member(
            self.name, self.rank, self.incarnation, self.addresses_of(), self.host_id
        )

    def hello(
        self,
        *,
        expects: str = "",
        attempt: int = 0,
        verdict: str = "",
        lane: int = 0,
        resume: int = 0,
        received: int = 0,
    ) -> Hello:
        """Return the HELLO that introduces the worker to a peer."""
        return Hello(
            name=self.name,
            incarnation=self.incarnation,
            rank=self.rank,
            pid=self.pid,
            expects=expects,
            attempt=attempt,
            verdict=verdict,
            addresses=self.addresses_of(),
            host_id=self.host_id,
            strict=self.is_strict,
            lane=lane,
            resume=resume,
            received=received,
            sidecar=self.sidecar_at(),
            observes=self.observes,
        )
