"""The collectives service of a worker: every group that the worker is in."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from asyncrpc.collectives.elastic import ElasticGroups
from asyncrpc.collectives.machine.operations import CollectiveFailure
from asyncrpc.collectives.machine.views import View
from asyncrpc.collectives.matching import CLOSED, Matching
from asyncrpc.collectives.messages import (
    SERVICE,
    CollectiveBegun,
    CollectiveFailed,
    CountBegun,
    GroupLeft,
    MemberStanding,
    RankGone,
    SentTensor,
    TensorBlock,
    WakeUp,
)
from asyncrpc.collectives.ports import GroupWorker
from asyncrpc.errors import (
    GroupChangedError,
    MalformedError,
    UsageError,
)
from asyncrpc.ids import WorkerId
from asyncrpc.runtime.ports import PeerLink
from asyncrpc.runtime.router import answers, takes

# Groups that other workers have made and this worker has not made yet.
UNKNOWN_MAX: Final = 1024
CLOSED_KEPT: Final = 1024


N = TypeVar("N", CollectiveBegun, WakeUp, CollectiveFailed, GroupLeft, RankGone)


class CollectivesService:
    """The groups of one worker; a `runtime.extensions.Service`.

    Attributes:
        worker: this worker.
        elastic: the elastic groups that it is in, or asks to be in.
    """

    name = SERVICE

    def __init__(self, worker: GroupWorker) -> None:
        self.worker = worker
        self._groups: dict[int, Matching] = {}
        self._closed: OrderedDict[int, str] = OrderedDict()
        self._made: defaultdict[int, int] = defaultdict(int)
        self._lost: dict[str, tuple[WorkerId, str]] = {}
        self.elastic = ElasticGroups(worker)
        self.routes = [
            answers(CountBegun, self._on_count),
            answers(TensorBlock, self._on_block),
            answers(SentTensor, self._on_point),
            takes(WakeUp, self._unless_closed(self._on_woke)),
            takes(CollectiveBegun, self._unless_closed(self._on_begun)),
            takes(CollectiveFailed, self._unless_closed(self._on_failed)),
            takes(GroupLeft, self._unless_closed(self._on_left)),
            takes(RankGone, self._unless_closed(self._on_told_lost)),
            takes(MemberStanding, self.elastic.on_standing),
        ]

    # --- groups ----------------------------------------------------------------------

    @property
    def groups(self) -> list[Matching]:
        """The groups that are open here, in the order in which they were made.

        Thread safety: from any thread.
        """
        return [one for one in tuple(self._groups.values()) if one.members]

    def open(self, name: str, members: Sequence[str]) -> Matching:
        """Make a group here.

        Raises:
            UsageError: this worker is not a member, or the group is open already.
        """
        if self.worker.name not in members:
            raise UsageError(
                f"worker {self.worker.name!r} is not among the members of this group: "
                f"{', '.join(map(repr, members))}"
            )
        base = group_id(name, members, 0)
        if (
            self._made[base]
            and group_id(name, members, self._made[base]) in self._groups
        ):
            raise UsageError(
                f"a group of these members with name {name!r} is already open on "
                f"worker {self.worker.name!r}; close it first, or choose another name"
            )
        self._made[base] += 1
        matching = self._find(group_id(name, members, self._made[base]))
        label = f"group {name!r}" if name else "a group"
        known = self.worker.directory.known_incarnation
        matching.lives = {member: known(member) for member in members}
        self._join(matching, label, name, members)
        return matching

    def open_view(self, name: str, view: View) -> Matching:
        """Make the group of a view of an elastic group."""
        members = [one.name for one in view.members]
        path = path_of(name, view.generation)
        lives = ",".join(str(one.incarnation) for one in view.members)
        matching = self._find(group_id(f"{path}\0{lives}", members, view.generation))
        label = f"group {name!r} (generation {view.generation})"
        matching.lives = dict(view.members)
        matching.is_elastic = True
        self._join(matching, label, path, members)
        return matching

    def _join(
        self, matching: Matching, label: str, path: str, members: Sequence[str]
    ) -> None:
        matching.path = path
        matching.join(
            f"{label} of {len(members)}", members, members.index(self.worker.name)
        )
        for lost, reason in self._lost.values():
            if matching.has(lost):
                matching.on_lost(lost.name, reason)
        for whole in list(self._groups.values()):
            if whole.is_elastic and matching.path.startswith(f"{whole.path}/"):
                for failure in whole.machine.failures:
                    self._fail_parts(whole, failure)

    def close_group(self, matching: Matching, deed: str = CLOSED) -> None:
        """Leave a group: its collectives fail, and messages for it are refused.

        Args:
            matching: the group.
            deed: what this rank does, as in "rank 1 ('b') `deed` a group of 3".
        """
        if self._groups.pop(matching.id, None) is None:
            return
        self._closed[matching.id] = matching.label
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        matching.leave(deed)

    def close_whole(self, matching: Matching, deed: str) -> None:
        """Leave a group, and all groups that were made of some of its ranks."""
        # The parts first: collectives that a member ended in them before it left count.
        for one in (*self._parts_of(matching), matching):
            self.close_group(one, deed)

    def _parts_of(self, matching: Matching) -> list[Matching]:
        """Return the groups that were made here of a generation of an elastic group."""
        if not matching.is_elastic:
            return []
        prefix = f"{matching.path}/"
        return [one for one in self._groups.values() if one.path.startswith(prefix)]

    def _fail_parts(self, matching: Matching, failure: CollectiveFailure) -> None:
        """Fail the groups made of a generation: others may not have made them yet."""
        for one in self._parts_of(matching):
            is_member = not set(failure.ranks).isdisjoint(one.members)
            if is_member and not one.machine.has_lost(failure.ranks):
                one.lose(failure, tell=False)

    def _find(self, number: int) -> Matching:
        found = self._groups.get(number)
        if found is None:
            unknown = sum(not one.members for one in self._groups.values())
            if unknown >= UNKNOWN_MAX:
                raise MalformedError(
                    f"messages have come for {unknown} groups that this worker has not "
                    "made, which is the limit"
                )
            found = self._groups[number] = Matching(self.worker, number)
        return found

    # --- messages --------------------------------------------------------------------

    async def _on_count(self, _: PeerLink, asked: CountBegun) -> int | None:
        """Return how many collectives of a group have begun here; None: closed."""
        if asked.group in self._closed:
            return None
        matching = self._groups.get(asked.group)
        return 0 if matching is None else matching.machine.operations.begun

    async def _on_block(
        self, link: PeerLink, block: TensorBlock
    ) -> CollectiveFailure | None:
        if (refusal := self._refusal(block.group)) is not None:
            return refusal
        matching = self._speaking(link, block.group, block.rank)
        return await matching.on_block(block)

    async def _on_point(
        self, link: PeerLink, point: SentTensor
    ) -> CollectiveFailure | None:
        if (refusal := self._refusal(point.group)) is not None:
            return refusal
        matching = self._speaking(link, point.group, point.rank)
        return await matching.points.on_point(point.rank, point.tag, point.tensor)

    def _refusal(self, group: int) -> CollectiveFailure | None:
        """Return the failure that refuses a message if the group was closed here."""
        closed = self._closed.get(group)
        if closed is None:
            return None
        problem = f"{closed} is closed at worker {self.worker.name!r}"
        return CollectiveFailure(GroupChangedError.code, problem, (self.worker.name,))

    def _unless_closed(
        self, handler: Callable[[PeerLink, N], None]
    ) -> Callable[[PeerLink, N], None]:
        """Return a handler of notices that drops those about a closed group."""

        def take(link: PeerLink, notice: N) -> None:
            if notice.group not in self._closed:
                handler(link, notice)

        return take

    def _on_begun(self, link: PeerLink, begun: CollectiveBegun) -> None:
        matching = self._speaking(link, begun.group, begun.rank)
        matching.on_begun(begun.number, begun.rank, begun.descriptor)

    def _on_woke(self, link: PeerLink, woke: WakeUp) -> None:
        self._speaking(link, woke.group).on_woke()

    def _on_failed(self, link: PeerLink, failed: CollectiveFailed) -> None:
        matching = self._speaking(link, failed.group)
        matching.on_failed(failed.number, failed.failure)

    def _on_left(self, link: PeerLink, left: GroupLeft) -> None:
        matching = self._speaking(link, left.group)
        matching.lose(left.failure, ended=left.ended, tell=False)
        self._fail_parts(matching, left.failure)

    def _on_told_lost(self, link: PeerLink, lost: RankGone) -> None:
        matching = self._speaking(link, lost.group)
        matching.lose(lost.failure, tell=False)
        self._fail_parts(matching, lost.failure)

    def _speaking(
        self, link: PeerLink, group: int, rank: int | None = None
    ) -> Matching:
        """Return the group that a worker names, after checking its membership.

        Raises:
            MalformedError: the worker is not a member, or does not have that rank.
        """
        matching = self._find(group)
        matching.machine.check_speaker(link.peer.name, rank)
        return matching

    # --- life ------------------------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every group that the worker was in."""
        self._lost[peer.name] = peer, reason
        for matching in list(self._groups.values()):
            if matching.has(peer):
                matching.on_lost(peer.name, reason)
            if matching.machine.is_hearsay_of(peer.name):
                del self._groups[matching.id]
        self.elastic.on_peer_lost(peer)

    def on_peer_back(self, peer: WorkerId) -> None:
        """New groups may include the worker; failed ones stay failed."""
        self._lost.pop(peer.name, None)
        self.elastic.on_peer_back(peer)

    async def close(self) -> None:
        """Leave every group.

        Cancellation:
            It never waits.
        """
        for matching in list(self._groups.values()):
            if matching.members:
                self.close_group(matching)
        self.elastic.close()


def path_of(name: str, generation: int) -> str:
    """Return the name of one generation of an elastic group."""
    return f"{name}@{generation}"


def group_id(name: str, members: Sequence[str], made: int) -> int:
    """Return the number by which the ranks of a group know it."""
    # Users choose names, which may not be valid Unicode.
    text = "\0".join((name, str(made), *members)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
