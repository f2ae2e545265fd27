"""The part of a worker that takes part in collectives: every group it is in."""

from __future__ import annotations

import hashlib
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import torch

from asyncrpc.collectives.machine.operations import Descriptor, Failure, Place
from asyncrpc.collectives.matching import Matching
from asyncrpc.collectives.words import SERVICE, required_failure, words_for
from asyncrpc.errors import (
    GroupChangedError,
    MalformedError,
    UsageError,
)
from asyncrpc.ids import WorkerId

if TYPE_CHECKING:
    from asyncrpc.runtime.links.link import Link
    from asyncrpc.runtime.worker import Worker

# Groups that others have made and this worker has not yet.
UNKNOWN_MAX: Final = 1024
CLOSED_KEPT: Final = 1024


class CollectivesService:
    """The groups of one worker; a `runtime.extensions.Service`."""

    name = SERVICE

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self._groups: dict[int, Matching] = {}
        self._closed: OrderedDict[int, str] = OrderedDict()
        self._made: defaultdict[int, int] = defaultdict(int)
        self._lost: dict[str, str] = {}

    # --- groups ----------------------------------------------------------------------

    def open(self, name: str, members: Sequence[str]) -> Matching:
        """Make a group here.

        Raises:
            UsageError: this worker is not in it, or it is open already.
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
                f"the group {name or 'without a name'!r} of these members is open on "
                f"worker {self.worker.name!r} already; close it first, or give this "
                "one another name"
            )
        self._made[base] += 1
        number = group_id(name, members, self._made[base])
        matching = self._find(number)
        label = f"group {name!r}" if name else "a group"
        matching.join(
            f"{label} of {len(members)}", members, members.index(self.worker.name)
        )
        for lost, reason in self._lost.items():
            matching.on_lost(lost, reason)
        return matching

    def close_group(self, matching: Matching) -> None:
        """Leave a group: what is under way fails, and what comes for it is refused."""
        if self._groups.pop(matching.id, None) is None:
            return
        self._closed[matching.id] = matching.label
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)
        matching.leave()

    def _find(self, number: int) -> Matching:
        found = self._groups.get(number)
        if found is None:
            unknown = sum(not one.members for one in self._groups.values())
            if unknown >= UNKNOWN_MAX:
                raise MalformedError(
                    f"{unknown} groups are known by messages alone; no more are taken"
                )
            found = self._groups[number] = Matching(self.worker, number)
        return found

    # --- messages --------------------------------------------------------------------

    async def on_request(self, link: Link, method: str, value: Any) -> Any:
        """Take a message of a collective, or say how many have begun."""
        if type(value) is not list or not value or type(value[0]) is not int:
            raise MalformedError(f"a message {method!r} of no group")
        closed = self._closed.get(value[0])
        if closed is not None:
            problem = f"{closed} is closed at worker {self.worker.name!r}"
            names = (self.worker.name,)
            return words_for(Failure(GroupChangedError.code, problem, names))
        matching = self._find(value[0])
        if method == "begun":
            return matching.operations.begun
        if method == "block":
            return words_for(await self._on_block(link, matching, value))
        if method == "point":
            return words_for(await self._on_point(link, matching, value))
        raise MalformedError(f"collectives do not answer {method!r}")

    async def _on_block(
        self, link: Link, matching: Matching, value: list[Any]
    ) -> Failure | None:
        match value:
            case [_, int(number), int(rank), int(index), what, [*tensors]] if all(
                isinstance(tensor, torch.Tensor) for tensor in tensors
            ):
                self._check(link, matching, rank)
                descriptor = None if what is None else Descriptor.read(what)
                place = Place(rank, index)
                return await matching.on_block(number, place, descriptor, tensors)
        raise MalformedError("a message of a collective that cannot be read")

    async def _on_point(
        self, link: Link, matching: Matching, value: list[Any]
    ) -> Failure | None:
        match value:
            case [_, int(rank), int(tag), torch.Tensor() as tensor]:
                self._check(link, matching, rank)
                return await matching.points.on_point(rank, tag, tensor)
        raise MalformedError("a tensor for one rank that cannot be read")

    def on_notice(self, link: Link, method: str, value: Any) -> None:
        """Take the word of another rank about a collective."""
        if type(value) is not list or not value or type(value[0]) is not int:
            raise MalformedError(f"a word {method!r} of no group")
        if value[0] in self._closed:
            return
        matching = self._find(value[0])
        match method, value[1:]:
            case "woke", []:
                matching.on_woke()
            case "begun", [int(number), int(rank), what]:
                self._check(link, matching, rank)
                matching.on_begun(number, rank, Descriptor.read(what))
            case "failed", [int(number), words]:
                matching.on_failed(number, required_failure(words))
            case "left", [int(ended), words]:
                matching.lose(required_failure(words), ended=ended, tell=False)
            case "lost", [words]:
                matching.lose(required_failure(words), tell=False)
            case _:
                raise MalformedError(f"a word {method!r} of a collective: {value!r}")

    @staticmethod
    def _check(link: Link, matching: Matching, rank: int) -> None:
        """Refuse words in another's name."""
        members = matching.members
        if members and not (
            0 <= rank < len(members) and members[rank] == link.peer.name
        ):
            raise MalformedError(
                f"worker {link.peer.name!r} speaks as rank {rank} of {matching.label}"
            )

    # --- life ------------------------------------------------------------------------

    def on_peer_lost(self, peer: WorkerId, reason: str) -> None:
        """Let every group fail that the worker was in."""
        self._lost[peer.name] = reason
        for matching in list(self._groups.values()):
            matching.on_lost(peer.name, reason)

    def on_peer_back(self, peer: WorkerId) -> None:
        """Groups made from now on may have it; those that failed stay so."""
        self._lost.pop(peer.name, None)

    async def close(self) -> None:
        """Leave every group.

        Cancellation:
            It never waits.
        """
        for matching in list(self._groups.values()):
            if matching.members:
                self.close_group(matching)


def group_id(name: str, members: Sequence[str], made: int) -> int:
    """Return the number by which the ranks of a group know it."""
    # Names are as users give them: they may have what is no Unicode.
    text = "\0".join((name, str(made), *members)).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1
