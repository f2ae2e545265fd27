"""The protocol's own messages on their way out: batched, kept until a link is there.

A release or the return of a loan can wait: until then another worker only keeps a value
a little longer.  So they are collected, and each worker gets one message of each kind
in a turn of the loop.  Questions and answers go at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from asyncrpc.core.ids import Incarnation, RRefId, WorkerId
from asyncrpc.core.parts import Parts
from asyncrpc.core.rref.messages import Release, Released, Returned
from asyncrpc.core.services.schema import Notice
from asyncrpc.errors import CallError, TransportError, UsageError

# Entries of one message: 64 KiB or so.  A worker that lets go of more sends several.
BATCH_MAX: Final = 4096


class _NoticeBatch:
    """Forks and loans to return to one worker."""

    __slots__ = ("releases", "tokens")

    def __init__(self) -> None:
        self.releases: dict[RRefId, int] = {}
        self.tokens: list[int] = []


class Notices:
    """Messages of one worker to the owners, lenders and holders of its references.

    Thread safety: none; all calls on the worker's loop.
    """

    def __init__(
        self,
        worker: Parts,
        *,
        name_of: Callable[[Incarnation], str],
        on_unreachable: Callable[[WorkerId, str], None],
    ) -> None:
        """Prepare to send.

        Args:
            name_of: the name of a worker, empty if it is not known.
        """
        self._worker = worker
        self._link_of = worker.directory.link_of
        self._name_of = name_of
        self._on_unreachable = on_unreachable
        self._batches: dict[Incarnation, _NoticeBatch] = {}
        self._is_due = False
        # Messages to workers that are being connected to; bounded by what is held of
        # them: one question and one answer for each reference, and the batches.
        self._waiting: dict[Incarnation, list[Notice]] = {}
        self._connecting: set[Incarnation] = set()

    def release(self, to: Incarnation, rref_id: RRefId, forks: int) -> None:
        """Give forks back to their owner, soon."""
        releases = self._batch(to).releases
        releases[rref_id] = releases.get(rref_id, 0) + forks
        if len(releases) >= BATCH_MAX:
            self._send_batch(to)

    def return_loan(self, to: Incarnation, token: int) -> None:
        """Give a loan back to its lender, soon."""
        tokens = self._batch(to).tokens
        tokens.append(token)
        if len(tokens) >= BATCH_MAX:
            self._send_batch(to)

    def _batch(self, to: Incarnation) -> _NoticeBatch:
        batch = self._batches.get(to)
        if batch is None:
            batch = self._batches[to] = _NoticeBatch()
            if not self._is_due:
                self._is_due = True
                self._worker.loop.call_soon(self.flush)
        return batch

    def flush(self) -> None:
        """Send what has been collected."""
        self._is_due = False
        while self._batches:
            self._send_batch(next(iter(self._batches)))

    def _send_batch(self, to: Incarnation) -> None:
        batch = self._batches.pop(to)
        if batch.releases:
            self.send(
                to, Release([Released(*release) for release in batch.releases.items()])
            )
        if batch.tokens:
            self.send(to, Returned(batch.tokens))

    def send(self, to: Incarnation, notice: Notice) -> None:
        """Send a message; make the connection first if necessary."""
        link = self._link_of(to)
        if link is not None and to not in self._waiting:
            link.tell(notice)
            return
        self._waiting.setdefault(to, []).append(notice)
        self.connect(to)

    def connect(self, to: Incarnation) -> None:
        """Make a connection, and send what waits for it."""
        if to not in self._connecting and not self._worker.is_closed:
            self._connecting.add(to)
            self._worker.start_task(self._connect(to))

    async def _connect(self, to: Incarnation) -> None:
        try:
            await self._connect_and_send(to)
        finally:
            self._connecting.discard(to)

    async def _connect_and_send(self, to: Incarnation) -> None:
        name = self._name_of(to)
        try:
            link = await self._worker.link_to(name)
        except (CallError, TransportError, UsageError) as error:
            incoming_link = self._link_of(to)
            if incoming_link is None:
                self._on_unreachable(WorkerId(name, to), str(error))
                return
            link = incoming_link  # it has dialed itself, after all
        if link.peer.incarnation != to:
            self._on_unreachable(WorkerId(name, to), "it has been restarted")
            return
        for notice in self._waiting.pop(to, []):
            link.tell(notice)

    def forget(self, to: Incarnation) -> None:
        """Drop the messages to a worker that is lost."""
        self._waiting.pop(to, None)
        self._batches.pop(to, None)

    def close(self) -> None:
        """Send what can be sent at once: the worker ends."""
        for to in tuple(self._batches):
            if self._link_of(to) is None:
                del self._batches[to]
        self.flush()
