"""The collectives service of a worker: every group that the worker is in."""

from __future__ import annotations

import asyncio
import hashlib
import sys
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, TypeVar

from asyncrpc.errors import (
    GroupChangedError,
    MalformedError,
    UsageError,
)
from asyncrpc.extend import Incarnation, PeerLink, ServiceHost, WorkerId, answers, takes
from asyncrpc.parallel.collectives.elastic import ElasticGroups
from asyncrpc.parallel.collectives.machine.operations import (
    EARLY_MAX,
    CollectiveFailure,
)
from asyncrpc.parallel.collectives.machine.views import View
from asyncrpc.parallel.collectives.matching import CLOSED, EarlyMessages, Matching
from asyncrpc.parallel.collectives.messages import (
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

# Groups that another worker has made and this worker has not made yet.
UNKNOWN_MAX: Final = 1024
CLOSED_KEPT: Final = 1024
LOST_KEPT: Final = 4096
EARLY_BYTES: Final = 1 << 10  # of a message for such a group, besides its content


N = TypeVar("N", CollectiveBegun, WakeUp, CollectiveFailed, GroupLeft, RankGone)


class CollectivesService:
    """The groups of one worker; a `runtime.extensions.Service`.

    Attributes:
        elastic: the elastic groups that it is in, or asks to be in.
    """

    name = SERVICE

    def __init__(self, worker: ServiceHost) -> None:
        self.worker = worker
        self._groups: dict[int, Matching] = {}
        self._closed: OrderedDict[int, str] = OrderedDict()
        self._serials: defaultdict[int, int] = defaultdict(int)
        self._lost: OrderedDict[str, tuple[WorkerId, str]] = OrderedDict()
        self._early: Counter[Incarnation] = Counter()  # bytes of each sender
        self.elastic = ElasticGroups(worker)
        self.routes = [
            answers(CountBegun, self._on_count),
            answers(TensorBlock, self._on_block),
            answers(SentTensor, self._on_point),
            takes(WakeUp, self._in_group(self._on_woke)),
            takes(CollectiveBegun, self._in_group(self._on_begun)),
            takes(CollectiveFailed, self._in_group(self._on_failed)),
            takes(GroupLeft, self._in_group(self._on_left)),
            takes(RankGone, self._in_group(self._on_told_lost)),
            takes(MemberStanding, self.elastic.on_standing),
        ]

    # --- groups ----------------------------------------------------------------------

    @property
    def groups(self) -> list[Matching]:
        """The groups that are open here, in the order in which they were made.

        Thread safety: from any thread.
        """
        return [group for group in tuple(self._groups.values()) if group.members]

    def open(self, name: str, members: Sequence[str]) -> Matching:
        """Make a group here."""
        if self.worker.name not in members:
            raise UsageError(
                f"worker {self.worker.name!r} is not among the members of this group: "
                f"{', '.join(map(repr, members))}"
            )
        base = group_id(name, members, 0)
        if (
            self._serials[base]
            and group_id(name, members, self._serials[base]) in self._groups
        ):
            raise UsageError(
                f"a group of these members with name {name!r} is already open on "
                f"worker {self.worker.name!r}; close it first, or choose another name"
            )
        self._serials[base] += 1
        matching = self._find(group_id(name, members, self._serials[base]))
        label = f"group {name!r}" if name else "a group"
        known = self.worker.incarnation_of
        matching.lives = {member: known(member) for member in members}
        self._join(matching, label, name, members)
        return matching

    def open_view(self, name: str, view: View) -> Matching:
        """Make the group of a view of an elastic group."""
        members = [member.name for member in view.members]
        path = path_of(name, view.generation)
        lives = ",".join(str(member.incarnation) for member in view.members)
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
        for kept in matching.early.values():
            self._early[kept.sender] -= kept.nbytes
            if not self._early[kept.sender]:
                del self._early[kept.sender]
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
        """Leave a group: its collectives fail, and messages for it are refused."""
        if self._groups.pop(matching.id, None) is None:
            return
        self._closed[matching.id] = matching.label
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        matching.leave(deed)

    def close_whole(self, matching: Matching, deed: str) -> None:
        """Leave a group, and all groups that were made of some of its ranks."""
        # The parts first: collectives that a member ended in them before it left count.
        for group in (*self._parts_of(matching), matching):
            self.close_group(group, deed)

    def _parts_of(self, matching: Matching) -> list[Matching]:
        """Return the groups that were made here of a generation of an elastic group."""
        if not matching.is_elastic:
            return []
        prefix = f"{matching.path}/"
        return [
            group for group in self._groups.values() if group.path.startswith(prefix)
        ]

    def _fail_parts(self, matching: Matching, failure: CollectiveFailure) -> None:
        """Fail the groups made of a generation: others may not have made them yet."""
        for part in self._parts_of(matching):
            is_member = not set(failure.ranks).isdisjoint(part.members)
            if is_member and not part.machine.has_lost(failure.ranks):
                part.lose(failure, tell=False)

    def _find(self, number: int) -> Matching:
        matching = self._groups.get(number)
        if matching is None:
            matching = self._groups[number] = Matching(self.worker, number)
        return matching

    # --- messages --------------------------------------------------------------------

    async def _on_count(self, link: PeerLink, asked: CountBegun) -> int | None:
        """Return how many collectives of a group have begun here; None: closed."""
        if asked.group in self._closed:
            return None
        matching = self._groups.get(asked.group)
        if matching is None or not matching.members:
            return 0
        matching.machine.check_speaker(link.peer.name)
        return matching.machine.operations.begun

    async def _on_block(
        self, link: PeerLink, block: TensorBlock
    ) -> CollectiveFailure | None:
        matching = await self._made_group(link, block.group, block.number)
        if isinstance(matching, CollectiveFailure):
            return matching
        matching.machine.check_speaker(link.peer.name, block.rank)
        return await matching.on_block(block)

    async def _on_point(
        self, link: PeerLink, point: SentTensor
    ) -> CollectiveFailure | None:
        matching = await self._made_group(link, point.group)
        if isinstance(matching, CollectiveFailure):
            return matching
        matching.machine.check_speaker(link.peer.name, point.rank)
        return await matching.points.on_point(point.rank, point.tag, point.tensor)

    async def _made_group(
        self, link: PeerLink, group: int, number: int = 0
    ) -> Matching | CollectiveFailure:
        """Return a group once it is made here; the failure if it was closed here."""
        if group not in self._closed:
            matching = self._groups.get(group)
            if matching is not None and matching.members:
                return matching
            turn = self.worker.loop.create_future()
            # The request counts as long as it waits.
            self._keep(link, group, partial(_wake, turn), number, nbytes=0)
            await turn  # a sender that gives up, or is lost, cancels this
            if group not in self._closed:
                return self._find(group)
        problem = f"{self._closed[group]} is closed at worker {self.worker.name!r}"
        return CollectiveFailure(GroupChangedError.code, problem, (self.worker.name,))

    def _in_group(
        self, handler: Callable[[Matching, N, str], None]
    ) -> Callable[..., None]:
        """Return a handler of notices of a group's members; others are refused.

        Nothing happens in a group that was closed here.  What comes before the group is
        made here is kept, of each sender apart: who is a member is not known yet.
        """

        def take(link: PeerLink, notice: N) -> None:
            if notice.group in self._closed:
                return
            matching = self._groups.get(notice.group)
            if matching is None or not matching.members:
                number = getattr(notice, "number", 0)
                take_it = partial(take_early, link, notice)
                nbytes = EARLY_BYTES + _bytes_of(notice.pack())
                self._keep(link, notice.group, take_it, number, nbytes)
                return
            rank = getattr(notice, "rank", None)
            matching.machine.check_speaker(link.peer.name, rank)
            handler(matching, notice, link.peer.name)

        def take_early(link: PeerLink, notice: N) -> None:
            with suppress(MalformedError):  # of a stranger
                take(link, notice)

        return take

    def _keep(
        self,
        link: PeerLink,
        group: int,
        take: Callable[[], None],
        number: int,
        nbytes: int,
    ) -> None:
        """Keep what a worker says of a group that is not made here."""
        name, matching = link.peer.name, self._groups.get(group)
        kept = None if matching is None else matching.early.get(name)
        unknown = 0
        if kept is None:
            kept = EarlyMessages(link.peer.incarnation)
            unknown = sum(name in group.early for group in self._groups.values())
        if unknown >= UNKNOWN_MAX:
            raise MalformedError(
                f"messages of worker {name!r} have come for {unknown} groups that this "
                "worker has not made, which is the limit"
            )
        if max(number, len(kept.takes)) >= EARLY_MAX:
            raise MalformedError(
                f"collective {number} is too far ahead: this worker has not made the "
                "group"
            )
        link.check_room(nbytes)
        self._find(group).early[name] = kept
        kept.takes.append(take)
        kept.nbytes += nbytes
        self._early[kept.sender] += nbytes

    def held_for(self, peer: Incarnation) -> int:
        """Return how many bytes messages for unknown groups take (HoldsForPeers)."""
        return self._early[peer]

    def _on_begun(self, matching: Matching, begun: CollectiveBegun, _by: str) -> None:
        matching.on_begun(begun.number, begun.rank, begun.descriptor)

    def _on_woke(self, matching: Matching, _: WakeUp, _by: str) -> None:
        matching.on_woke()

    def _on_failed(
        self, matching: Matching, failed: CollectiveFailed, _by: str
    ) -> None:
        matching.on_failed(failed.number, failed.failure)

    def _on_left(self, matching: Matching, message: GroupLeft, by: str) -> None:
        if message.failure.ranks != (by,):
            raise MalformedError(
                f"worker {by!r} left {matching.label} in the name of another: "
                f"{message.failure.ranks}"
            )
        matching.lose(message.failure, ended=message.ended, tell=False)
        self._fail_parts(matching, message.failure)

    def _on_told_lost(self, matching: Matching, lost: RankGone, _by: str) -> None:
        matching.lose(lost.failure, tell=False)
        self._fail_parts(matching, lost.failure)

    # --- life ------------------------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Fail every group that the worker was in."""
        self._lost[peer.name] = peer, reason
        if len(self._lost) > LOST_KEPT:
            self._lost.popitem(last=False)
        del self._early[peer.incarnation]
        for matching in list(self._groups.values()):
            if matching.has(peer):
                matching.on_lost(peer.name, reason)
            matching.early.pop(peer.name, None)
            if not (matching.members or matching.early):
                del self._groups[matching.id]
        self.elastic.on_peer_lost(peer)

    def on_peer_back(self, peer: WorkerId) -> None:
        """New groups may include the worker; failed ones stay failed."""
        self._lost.pop(peer.name, None)
        self.elastic.on_peer_back(peer)

    async def close(self) -> None:
        """Leave every group."""
        for matching in list(self._groups.values()):
            if matching.members:
                self.close_group(matching)
        self.elastic.close()


def _bytes_of(content: Any) -> int:
    """Return what the content of a message takes in memory."""
    parts = content if type(content) is list else ()
    return sys.getsizeof(content) + sum(map(_bytes_of, parts))


def _wake(turn: asyncio.Future[None]) -> None:
    """Let a request go on, unless its sender has given it up."""
    if not turn.done():
        turn.set_result(None)


def path_of(name: str, generation: int) -> str:
    """Return the name of one generation of an elastic group."""
    return f"{name}@{generation}"


def group_id(name: str, members: Sequence[str], serial: int) -> int:
    """Return the number by which the ranks of a group know it."""
    # Users choose names, which may not be valid Unicode.
    text = "\0".join((name, str(serial), *members)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
