"""A stream from replicas: until its first item it may move, from then on it stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Any, Final

from asyncrpc import Peer
from asyncrpc.core.calls.streams import StreamReceiver
from asyncrpc.core.options import CallOptions
from asyncrpc.serving.replicas.call import (
    AttemptFailedError,
    ReplicaCall,
    raise_cause,
)
from asyncrpc.serving.replicas.machine.attempts import Health
from asyncrpc.serving.replicas.machine.routing import ReplicaRecord
from asyncrpc.serving.replicas.messages import read_note
from asyncrpc.serving.replicas.router import health_of

_NOTHING: Final = object()


class RoutedStream:
    """One attempt at a stream, at one replica."""

    __slots__ = ("_call", "_health", "_receivers", "items", "record")

    def __init__(
        self,
        call: ReplicaCall,
        record: ReplicaRecord,
        open_at: Callable[[Peer], AsyncGenerator[Any, None]],
        options: CallOptions,
    ) -> None:
        self._call = call
        self.record = record
        self._receivers: list[StreamReceiver] = []
        self._health = Health.UNKNOWN
        calls, loop = call.router.worker.parts.calls, call.router.worker.loop
        if call.deadline is not None:
            left_s = max(call.deadline.at_s - loop.time(), 0.0)
            options = replace(options, timeout_s=left_s)
        peer = Peer(calls, record.name, options, on_stream=self._receivers.append)
        self.items = open_at(peer)
        call.router.routing.begin(record)

    async def take(self) -> Any:
        """Return the next item, or `_NOTHING` at the end."""
        try:
            item = await anext(self.items, _NOTHING)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            self._take_note()
            failure = self._call.router.failure_of(self.record, error)
            self._health = health_of(failure)
            raise AttemptFailedError(failure, error) from error
        if self._health is Health.UNKNOWN:
            self._health = Health.GOOD
            self._take_note()  # of the first item
        return item

    async def close(self) -> None:
        """Count the attempt as ended, and close the generator at the replica."""
        try:
            await self.items.aclose()
        finally:
            self._call.router.end(self.record, self._health)
            self._take_note()

    def _take_note(self) -> None:
        for receiver in self._receivers:
            note = None if receiver.note is None else read_note(receiver.note)
            if note is not None:
                self._call.router.on_note(self.record, note)


async def stream_from(
    call: ReplicaCall,
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: CallOptions,
) -> AsyncGenerator[Any, None]:
    """Yield the items of a generator on a replica; see `Replicas.stream`."""

    def open_at(peer: Peer) -> AsyncGenerator[Any, None]:
        items: AsyncGenerator[Any, None] = peer.stream(function, *args, **kwargs)
        return items

    call.begin()
    last: AttemptFailedError | None = None
    while True:
        record = await call.next_record(last)
        call.note_attempt(record)
        attempt = RoutedStream(call, record, open_at, options)
        try:
            try:
                item = await attempt.take()
            except AttemptFailedError as failed:
                last = failed
                call.check_may_go_on(failed)
                continue
            while item is not _NOTHING:
                yield item
                try:
                    item = await attempt.take()
                except AttemptFailedError as failed:
                    raise_cause(failed)
            return
        finally:
            await attempt.close()
