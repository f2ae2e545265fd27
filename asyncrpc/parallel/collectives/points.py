"""Tensors from one rank to another: send and recv, matched by sender and tag.

A sent tensor waits at the receiver until it is taken; its sender waits as long.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from asyncrpc.errors import (
    AsyncRpcError,
    CollectiveError,
    CollectiveTimeoutError,
    WorkerLostError,
)
from asyncrpc.extend import ask
from asyncrpc.parallel.collectives.failure_errors import error_of
from asyncrpc.parallel.collectives.machine.operations import CollectiveFailure
from asyncrpc.parallel.collectives.messages import SentTensor

if TYPE_CHECKING:
    from asyncrpc.parallel.collectives.matching import Matching

WAITING_MAX: Final = 1 << 16  # tensors that have come and were not received


@dataclass(slots=True)
class _Come:
    """A tensor that has come before its receiver."""

    rank: int
    tag: int
    tensor: torch.Tensor
    answer: asyncio.Future[CollectiveFailure | None]


@dataclass(slots=True)
class _PendingReceive:
    """A receiver of a tensor that has not come yet."""

    rank: int | None
    tag: int
    got: asyncio.Future[torch.Tensor]

    def fits(self, rank: int, tag: int) -> bool:
        return tag == self.tag and self.rank in (None, rank)


class Points:
    """Point-to-point messages at one rank of a group."""

    def __init__(self, matching: Matching) -> None:
        self._matching = matching
        self._come: deque[_Come] = deque()
        self._wanted: deque[_PendingReceive] = deque()

    async def send(
        self, tensor: torch.Tensor, to: int, tag: int, timeout_s: float | None
    ) -> None:
        """Send a tensor; return when it has been taken."""
        matching = self._matching
        self._check()
        link = await matching.link(to)
        point = SentTensor(matching.id, matching.rank, tag, tensor)
        try:
            async with asyncio.timeout(timeout_s):
                failure = await ask(link, point)
        except TimeoutError:
            raise self._late("send to", to, tag, timeout_s) from None
        except WorkerLostError as error:
            matching.on_lost(matching.members[to], str(error))
            self._check()
            raise
        except AsyncRpcError as error:
            name = matching.members[to]
            raise CollectiveError(
                f"a tensor could not be sent to {matching.name_of(to)} in "
                f"{matching.label}: {error}",
                ranks=(name,),
            ) from error
        if failure is not None:
            raise error_of(failure)

    async def recv(
        self, from_: int | None, tag: int, timeout_s: float | None
    ) -> torch.Tensor:
        """Return the next tensor of a sender and tag."""
        self._check()
        wanted = _PendingReceive(from_, tag, self._matching.loop.create_future())
        for come in self._come:
            is_given_up = come.answer.done()  # its sender has; it is about to go
            if not is_given_up and wanted.fits(come.rank, come.tag):
                self._come.remove(come)
                come.answer.set_result(None)
                return come.tensor
        self._wanted.append(wanted)
        try:
            async with asyncio.timeout(timeout_s):
                return await wanted.got
        except TimeoutError:
            raise self._late("recv from", from_, tag, timeout_s) from None
        finally:
            if wanted in self._wanted:
                self._wanted.remove(wanted)

    async def on_point(
        self, rank: int, tag: int, tensor: torch.Tensor
    ) -> CollectiveFailure | None:
        """Take a tensor; return None once it has been received, else the failure."""
        if self._matching.lost is not None:
            return self._matching.lost
        for wanted in self._wanted:
            is_given_up = wanted.got.done()
            if not is_given_up and wanted.fits(rank, tag):
                self._wanted.remove(wanted)
                wanted.got.set_result(tensor)
                return None
        if len(self._come) >= WAITING_MAX:
            problem = (
                f"{self._matching.name_of(self._matching.rank)} has {WAITING_MAX} "
                "tensors waiting for recv, its limit; call recv there first"
            )
            return CollectiveFailure(CollectiveError.code, problem, ())
        come = _Come(rank, tag, tensor, self._matching.loop.create_future())
        self._come.append(come)
        try:
            return await come.answer  # or `fail`; a sender that gives up cancels this
        finally:
            if come in self._come:  # the sender has given it up
                self._come.remove(come)

    def fail(self, failure: CollectiveFailure) -> None:
        """Fail all sends and receives: the group has failed."""
        for wanted in self._wanted:
            if not wanted.got.done():
                wanted.got.set_exception(error_of(failure))
        for come in self._come:
            if not come.answer.done():
                come.answer.set_result(failure)

    def _check(self) -> None:
        if self._matching.lost is not None:
            raise error_of(self._matching.lost)

    def _late(
        self, operation: str, rank: int | None, tag: int, timeout_s: float | None
    ) -> CollectiveTimeoutError:
        matching = self._matching
        who = "any rank" if rank is None else matching.name_of(rank)
        return CollectiveTimeoutError(
            f"{operation} {who} with tag {tag} in {matching.label} has taken more than "
            f"{timeout_s:g} s",
            ranks=() if rank is None else (matching.members[rank],),
        )
