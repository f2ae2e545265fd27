"""The owners of one optimizer's parameters, and the maker's messages to them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from asyncrpc.core.calls.context import deadline_var, effective_deadline
from asyncrpc.core.ids import WorkerId
from asyncrpc.core.optim import messages as m
from asyncrpc.core.optim.groups import Group, owners_of, references_in
from asyncrpc.core.optim.service import OptimizerService
from asyncrpc.core.parts import Parts
from asyncrpc.core.serde import text_of, words_of
from asyncrpc.core.services.messages import Request
from asyncrpc.core.services.ports import PeerLink, ask
from asyncrpc.errors import AsyncRpcError, OptimizerError

T = TypeVar("T")
Ask = Callable[[WorkerId], Coroutine[Any, Any, T]]


class Owners:
    """Sends messages about one optimizer.

    Attributes:
        serial: number of the optimizer on this worker.
        listed: the owners, each once.
    """

    def __init__(self, worker: Parts, listed: Sequence[WorkerId]) -> None:
        # Only this package makes services of the name.
        service: Any = worker.service(m.SERVICE)
        self._service: OptimizerService = service
        self._worker = worker
        self.serial = self._service.next_serial()
        self.listed = list(listed)

    @property
    def me(self) -> WorkerId:
        """Return the worker that has made the optimizer."""
        return self._service.me

    @property
    def key(self) -> tuple[int, int]:
        """Return the key by which owners know the optimizer."""
        return self.me.incarnation, self.serial

    @property
    def only_other(self) -> WorkerId | None:
        """Return the other owner, if there are two and this worker is one of them."""
        if len(self.listed) != 2 or self.me not in self.listed:  # noqa: PLR2004
            return None
        return next(owner for owner in self.listed if owner != self.me)

    @property
    def only_one_elsewhere(self) -> WorkerId | None:
        """Return the only owner, if it is another worker."""
        if len(self.listed) != 1 or self.listed[0] == self.me:
            return None
        return self.listed[0]

    async def relist(self, groups: Sequence[Group]) -> None:
        """List the owners of groups again, once they are known for certain.

        While a parameter is being made over a connection that is not open, it is not
        yet known which life of that worker will have it.
        """
        link_of = self._worker.directory.link_of
        if all(owner == self.me or link_of(owner.incarnation) for owner in self.listed):
            return
        for parameter in references_in(groups):
            await parameter.made_on()
        self.listed = owners_of(groups)

    def add(self, owners: Sequence[WorkerId]) -> list[WorkerId]:
        """Add owners; return those that are new."""
        fresh = [owner for owner in owners if owner not in self.listed]
        self.listed += fresh
        return fresh

    async def ask(self, owner: WorkerId, request: Request[T]) -> T:
        """Send one message to an owner; return the answer."""
        worker = self._worker
        if owner == self._service.me:
            return await self._service.answer(request)
        link: PeerLink | None = worker.directory.link_of(owner.incarnation)
        if link is None:
            link = await worker.link_to(owner.name)
            if link.peer != owner:
                raise OptimizerError(
                    f"worker {owner.name!r} has been restarted, and its parameters are "
                    "lost; make them again, and a new optimizer"
                )
        limit = effective_deadline(worker.options.rpc_timeout_s, worker.loop.time())
        return await ask(link, request, deadline=limit)

    async def each(self, request: Request[T], *, problem: str) -> dict[WorkerId, T]:
        """Send one message to every owner; return the answers."""
        return await self.gather(
            list(self.listed), lambda owner: self.ask(owner, request), problem=problem
        )

    async def gather(
        self, owners: Sequence[WorkerId], ask: Ask[T], *, problem: str
    ) -> dict[WorkerId, T]:
        """Ask owners at once, wait for all, and name the owners that fail."""
        answers, failed = await try_each(owners, ask)
        if failed:
            first = next(iter(failed.values()))
            raise OptimizerError(f"{problem}: {named(failed)}") from first
        return answers

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Start work that is not cancelled with the caller."""
        task = self._worker.start_task(work)
        task.add_done_callback(_seen)
        return task

    async def settle(
        self, owners: Sequence[WorkerId], *, is_applied: bool
    ) -> dict[WorkerId, BaseException]:
        """Settle kept steps; return the errors of owners that could not be reached.

        The caller's deadline may have passed, but the steps must be settled: so each
        message has the time that any call has.
        """
        token = deadline_var.set(None)
        try:
            settle = m.SettleStep(self.serial, is_applied)
            _, failed = await try_each(owners, lambda owner: self.ask(owner, settle))
        finally:
            deadline_var.reset(token)
        return failed

    def let_go(self) -> None:
        """Queue a note to every owner that the optimizer is gone; from any thread."""
        worker = self._worker
        if not worker.is_closed and not worker.loop.is_closed():
            worker.loop.call_soon_threadsafe(self._tell_all)

    def _tell_all(self) -> None:
        for owner in self.listed:
            link: PeerLink | None = self._worker.directory.link_of(owner.incarnation)
            if owner == self._service.me:
                self._service.drop(owner.incarnation, self.serial)
            elif link is not None:
                link.tell(m.DropOptimizer(self.serial))


async def try_each(
    owners: Sequence[WorkerId], ask: Ask[T]
) -> tuple[dict[WorkerId, T], dict[WorkerId, BaseException]]:
    """Ask owners at once and wait for all; return their answers, and their errors."""
    results = await asyncio.gather(
        *(ask(owner) for owner in owners), return_exceptions=True
    )
    answers: dict[WorkerId, T] = {}
    failed: dict[WorkerId, BaseException] = {}
    for owner, result in zip(owners, results, strict=True):
        if isinstance(result, BaseException):
            failed[owner] = result
        else:
            answers[owner] = result
    return answers, failed


def _seen(task: asyncio.Task[Any]) -> None:
    """Mark an error as read, as the task that waits for it may have been cancelled."""
    if not task.cancelled():
        task.exception()


def named(failed: Mapping[WorkerId, BaseException]) -> str:
    """Return the names of failed owners, with their errors."""
    return "; ".join(
        f"worker {owner.name!r}: {error_text(error)}" for owner, error in failed.items()
    )


def error_text(error: BaseException) -> str:
    """Return the text of an owner's error, with its class unless that is ours."""
    kind = type(error)
    if issubclass(getattr(kind, "remote_class", kind), AsyncRpcError):
        return text_of(error)
    return words_of(error)
