"""The names of workers, by their incarnation: what the protocol's numbers stand for."""

from __future__ import annotations

from typing import Final

from asyncrpc.core.ids import Incarnation, WorkerId, WorkerInfo
from asyncrpc.core.links.directory import Directory
from asyncrpc.errors import UnknownWorkerError

# Names that are known from others' words alone.
HEARSAY_MAX: Final = 4096


class PeerNames:
    """Names of the workers that references have come from, or lead to."""

    def __init__(self, directory: Directory, me: WorkerId) -> None:
        self._directory = directory
        self._met: dict[Incarnation, str] = {me.incarnation: me.name}
        self._heard: dict[Incarnation, str] = {}

    def note(self, peer: WorkerId) -> None:
        """Record the name of a worker that has proved it."""
        self._met[peer.incarnation] = peer.name
        self._heard.pop(peer.incarnation, None)

    def note_hearsay(self, peer: WorkerId) -> None:
        """Record a name that another worker reported: it replaces no known name."""
        heard = self._heard
        if peer.incarnation in self._met or peer.incarnation in heard:
            return
        heard[peer.incarnation] = peer.name
        if len(heard) > HEARSAY_MAX:
            del heard[next(iter(heard))]

    def forget(self, peer: Incarnation) -> None:
        """Forget the name of a lost worker."""
        self._met.pop(peer, None)
        self._heard.pop(peer, None)

    def of(self, incarnation: Incarnation) -> str:
        """Return a worker's name, empty if it is not known.

        A worker that has not spoken to us may be listed.
        """
        directory = self._directory
        met = self._met.get(incarnation) or self._heard.get(incarnation, "")
        if met and directory.known_incarnation(met) == incarnation:
            return met  # nearly always; a group may have thousands of others
        listed = (
            member.name
            for member in directory.members
            if member.incarnation == incarnation
        )
        return next(listed, met)

    def shown(self, incarnation: Incarnation) -> str:
        """Return a worker's name, or its number if the name is not known."""
        return self.of(incarnation) or f"{incarnation:016x}"

    def info(self, worker_id: WorkerId) -> WorkerInfo:
        """Return a worker as programs see it."""
        try:
            return WorkerInfo(
                worker_id.name, self._directory.member(worker_id.name).rank
            )
        except UnknownWorkerError:
            return WorkerInfo(worker_id.name, -1)
