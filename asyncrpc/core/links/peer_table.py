"""The workers that one worker knows, by name and by rank.

A worker talks to few members of a large group.  Of the others it keeps only the record,
which all parts of the worker share; an entry, with what a connection needs, takes
1.1 KiB and is made when it is first wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from asyncrpc.core.arguments import check_kind
from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation
from asyncrpc.core.links.entry import PeerEntry
from asyncrpc.core.members import Member
from asyncrpc.errors import UnknownWorkerError


class PeerTable:
    """Records of workers, and entries of the workers that were wanted.

    Attributes:
        met: returns the entry of a worker by name; None before it is wanted.  Each call
            asks it: the dictionary's own method, without a frame around it.
    """

    def __init__(self, identity: WorkerIdentity) -> None:
        self._identity = identity
        self._unmet: dict[str, Member] = {}
        self._entries: dict[str, PeerEntry] = {}  # no name is in both
        self._by_rank: dict[int, str] = {}
        self.met: Callable[[str], PeerEntry | None] = self._entries.get

    def __iter__(self) -> Iterator[Member]:
        yield from self._unmet.values()
        for entry in self._entries.values():
            yield entry.member

    def add(self, members: Iterable[Member]) -> None:
        """Add workers, or what is newly known of them."""
        entries, unmet, by_rank = self._entries, self._unmet, self._by_rank
        for member in members:
            entry = entries.get(member.name)
            if entry is None:
                unmet[member.name] = member
            else:
                entry.member = member
            if member.rank >= 0:
                by_rank.setdefault(member.rank, member.name)

    def give_rank(self, rank: int, name: str) -> None:
        """Let a worker be found by a rank that another one had."""
        self._by_rank[rank] = name

    def forget(self, name: str) -> None:
        """Let go of a worker, unless there is a connection to it."""
        entry = self._entries.get(name)
        if entry is not None and (entry.machine.connection is not None or entry.dial):
            return
        member = self.get(name)
        if member is None:
            return
        self._unmet.pop(name, None)
        self._entries.pop(name, None)
        if self._by_rank.get(member.rank) == name:
            del self._by_rank[member.rank]

    def get(self, name: str) -> Member | None:
        """Return what is known of a worker; None if it is unknown."""
        entry = self._entries.get(name)
        return self._unmet.get(name) if entry is None else entry.member

    def member(self, to: str | int) -> Member:
        """Return what is known of a worker, by name or rank."""
        member = self.get(self._name_of(to))
        if member is None:
            raise self._unknown(to)
        return member

    def find(self, to: str | int) -> PeerEntry:
        """Return the entry of a worker by name or rank; make it at the first use."""
        name = self._name_of(to)
        entry = self._entries.get(name)
        if entry is None:
            member = self._unmet.pop(name, None)
            if member is None:
                raise self._unknown(to)
            entry = PeerEntry(member, self._identity.incarnation)
            self._entries[name] = entry
        return entry

    def _name_of(self, to: str | int) -> str:
        check_kind("to", to, (str, int), "the name or the rank of a worker")
        return self._by_rank.get(to, "") if isinstance(to, int) else to

    def _unknown(self, to: str | int) -> UnknownWorkerError:
        return UnknownWorkerError(to, sorted(member.name for member in self))

    def incarnation_of(self, name: str) -> Incarnation | None:
        """Return the incarnation that calls to a worker go to; None if not known."""
        member = self.get(name)
        return None if member is None else member.incarnation
