"""Observers: connections of programs that only look, such as `asyncrpc why`.

An observer authenticates as a worker does, and is not a member: no worker is told of
it, and no call goes to it or comes from it.  It may send the requests whose routes
allow it; questions and answers are plain data, so nothing of it is ever unpickled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgpack

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.ids import Incarnation, WorkerId
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.services.ports import Scheduler
from asyncrpc.core.services.router import Route, Router
from asyncrpc.core.services.schema import Sender, not_by
from asyncrpc.core.wire.frames import FRAMES_OF_OBSERVERS, FrameKind, Hello
from asyncrpc.errors import AsyncRpcError, MalformedError

logger = logging.getLogger("asyncrpc")

OBSERVERS_MAX: Final = 16
QUESTIONS_MAX: Final = 16  # of one observer at a time
QUESTION_BYTES_MAX: Final = 64 << 10  # unpacked on the loop, all at once


class Observers:
    """The observers of one worker.

    Attributes:
        router: has the routes of the worker's services.
    """

    def __init__(self, identity: WorkerIdentity, scheduler: Scheduler) -> None:
        self.router = Router()
        self._identity = identity
        self._scheduler = scheduler
        self._open: set[_ObserverLink] = set()

    def refusal(self, connection: Connection) -> str:
        """Return why an observer is not let in; empty if it is."""
        if connection.ticket:
            return "a token lets a worker join, but not observe; use the secret"
        if len(self._open) >= OBSERVERS_MAX:
            return (
                f"{OBSERVERS_MAX} observers are connected, the limit; try again later"
            )
        return ""

    def take(self, connection: Connection, hello: Hello) -> None:
        """Let an observer ask."""
        observer = _ObserverLink(connection, hello, self.router, self._scheduler)
        self._open.add(observer)
        connection.ended.add_done_callback(lambda _: self._end(observer))
        connection.hello(self._identity.hello())
        connection.open_to(observer)

    def _end(self, observer: _ObserverLink) -> None:
        self._open.discard(observer)
        observer.end()


class _ObserverLink:
    """One observer: takes its questions, one message each.

    Attributes:
        peer: as handlers see it.
        is_guest: it is not.
    """

    def __init__(
        self,
        connection: Connection,
        hello: Hello,
        router: Router,
        scheduler: Scheduler,
    ) -> None:
        self.peer = WorkerId(hello.name, Incarnation(hello.incarnation))
        self.is_guest = False
        self._connection = connection
        self._router = router
        self._scheduler = scheduler
        self._answering: dict[int, asyncio.Task[None]] = {}

    def on_message(
        self,
        kind: int,
        _flags: int,
        call_id: int,
        _aux: int,
        head: bytes,
        control: bytes,
        buffers: Sequence[memoryview],
    ) -> None:
        """Take a question, or the cancellation of one."""
        if kind not in FRAMES_OF_OBSERVERS or buffers:
            raise MalformedError(f"an observer sent a {FrameKind(kind).name}")
        if len(control) > QUESTION_BYTES_MAX:
            raise MalformedError(
                f"an observer sent a question of {len(control)} bytes; the limit is"
                f" {QUESTION_BYTES_MAX}"
            )
        if kind == FrameKind.CANCEL:
            if call_id in self._answering:
                self._answering[call_id].cancel()
            return
        if call_id in self._answering:
            raise MalformedError(f"an observer sent a {FrameKind(kind).name}")
        if len(self._answering) >= QUESTIONS_MAX:
            raise MalformedError(f"an observer asked {QUESTIONS_MAX} things at a time")
        route, value = self._router.request(head), unpacked(control)
        task = self._scheduler.start_task(self._answer(route, call_id, value))
        self._answering[call_id] = task
        task.add_done_callback(lambda _: self._answering.pop(call_id, None))

    def on_transfer_dropped(self, kind: int, _call_id: int) -> None:
        """Refuse it: an observer sends nothing that could be dropped."""
        raise MalformedError(f"an observer dropped a {FrameKind(kind).name}")

    async def _answer(self, route: Route, call_id: int, value: Any) -> None:
        kind, answer = FrameKind.RESPONSE, None
        asker: Any = self  # of which handlers see only `peer`, and that it is no guest
        try:
            answer = await self._handler_of(route)(asker, value)
        except AsyncRpcError as error:
            kind, answer = FrameKind.ERROR, str(error)
        except Exception as error:
            logger.exception("%s could not answer an observer", route.name)
            kind, answer = FrameKind.ERROR, repr(error)
        self._connection.send(kind, call_id, control=msgpack.packb(answer))

    def _handler_of(self, route: Route) -> Callable[[Any, Any], Any]:
        """Return what answers a question."""
        if Sender.OBSERVER not in route.by:
            raise not_by(self.peer.name, Sender.OBSERVER, route.name, route.by)
        return route.handle

    def end(self) -> None:
        """Give up what is being answered."""
        for task in self._answering.values():
            task.cancel()


def unpacked(control: bytes) -> Any:
    """Return plain data that has arrived."""
    try:
        return msgpack.unpackb(control, strict_map_key=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise MalformedError(f"plain data cannot be read: {error}") from error
