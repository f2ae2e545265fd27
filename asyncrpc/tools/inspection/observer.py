"""An observer: connects to workers and asks what they do, without being a member.

It has no name, rank or address in the group.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Any, Final, Self, TypeVar

import msgpack

from asyncrpc.core.identity import WorkerIdentity
from asyncrpc.core.links.connection import Connection
from asyncrpc.core.links.connections import Connections, ConnectionSettings
from asyncrpc.core.links.observers import unpacked
from asyncrpc.core.links.routes import Routes, open_connectors
from asyncrpc.core.links.sinks import SILENT
from asyncrpc.core.members import UNKNOWN_INCARNATION, Member
from asyncrpc.core.options import Options
from asyncrpc.core.serde import Policy
from asyncrpc.core.transport.address import Address
from asyncrpc.core.wire.frames import FrameKind, Hello
from asyncrpc.core.wire.handshake import Role
from asyncrpc.errors import (
    AsyncRpcError,
    ClosedError,
    ConnectError,
    ConnectionLostError,
    MalformedError,
    RejectedError,
)
from asyncrpc.extend import Deadline, Request

T = TypeVar("T")

# Finds workers; blocks the calling thread.
FindWorkers = Callable[[], Sequence[Member]]

CONNECT_S: Final = 3.0  # for a connection and its handshake


def _nobody() -> Sequence[Member]:
    return ()


class Observer:
    """Looks at workers; an asynchronous context manager.

    Example:
        >>> async with Observer(options) as observer:
        ...     seen = await observer.connect("tcp://10.0.0.2:7000")
    """

    def __init__(
        self,
        options: Options,
        *,
        timeout_s: float = CONNECT_S,
        find_beside: FindWorkers = _nobody,
    ) -> None:
        self._options = options
        self._timeout_s = timeout_s
        self._find_beside = find_beside

    async def __aenter__(self) -> Self:
        """Prepare to connect."""
        options = self._options
        name = f"observer-{os.getpid()}-{secrets.token_hex(4)}"
        is_strict = options.policy is Policy.STRICT
        self._identity = WorkerIdentity(name, -1, 0, is_strict=is_strict)
        self._identity.observes = True
        loop = asyncio.get_running_loop()
        settings = ConnectionSettings(
            options.secret_bytes,
            options.limits.message,
            lambda nbytes: memoryview(bytearray(nbytes)),
            os.urandom,
        )
        self._connections = Connections(self._identity, loop, settings)
        self._routes = Routes(open_connectors(options, None), timeout_s=self._timeout_s)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End all connections."""
        await self._connections.close(1.0)

    @property
    def secret(self) -> bytes | None:
        """The secret of the group, if it has one."""
        return self._options.secret_bytes

    async def beside(self, known: Collection[str]) -> list[Member]:
        """Return the other workers that are looked at with the group."""
        if self._find_beside is _nobody:
            return []
        members = await asyncio.to_thread(self._find_beside)
        return [member for member in members if member.name not in known]

    async def connect(self, to: str | Member) -> Observed:
        """Connect to a worker."""
        member = to
        if isinstance(member, str):
            Address.parse(member)
            member = Member("", -1, UNKNOWN_INCARNATION, (member,))
        addresses = self._routes.to(member)
        if not addresses:
            reasons = self._routes.passed_over(member) or "it has no address"
            raise ConnectError(
                f"{member.name!r} cannot be reached from here: {reasons}"
            )
        try:
            async with asyncio.timeout(self._timeout_s):
                dialled = await self._routes.connect(
                    addresses, lambda: self._connection(member)
                )
                hello = await dialled.handler.until_open()
        except TimeoutError as error:
            raise ConnectError(
                f"{addresses[0]} has not answered within {self._timeout_s:g} s"
            ) from error
        if hello.verdict:
            raise ConnectError(f"worker {hello.name!r} refused: {hello.verdict}")
        return Observed(dialled.handler, hello)

    def _connection(self, member: Member) -> Connection:
        def introduce(connection: Connection) -> None:
            if self._connections.is_trusted(connection):
                connection.hello(self._identity.hello(expects=member.name))

        def on_hello(connection: Connection, _: Hello) -> None:
            connection.open_to(SILENT)

        return self._connections.make(Role.DIALER, introduce, on_hello)


class Observed:
    """A worker that an observer is connected to.

    Attributes:
        hello: its greeting, with its name.
    """

    def __init__(self, connection: Connection, hello: Hello) -> None:
        self.hello = hello
        self.connection = connection
        self._asked: dict[int, asyncio.Future[Any]] = {}
        self._next_id = 1
        connection.ended.add_done_callback(lambda _: self._on_ended())
        connection.open_to(self)

    async def ask(self, request: Request[T], *, timeout_s: float) -> T:
        """Ask the worker."""
        call_id = self._next_id
        self._next_id += 1
        answer = asyncio.get_running_loop().create_future()
        if self.connection.ended.done():
            raise ConnectionLostError(f"worker {self.hello.name!r} has closed")
        self._asked[call_id] = answer
        self.connection.send(
            FrameKind.SERVICE,
            call_id,
            aux=Deadline(timeout_s, timeout_s).budget_ns(0.0),
            head=request.head,
            control=msgpack.packb(request.pack()),
        )
        try:
            async with asyncio.timeout(timeout_s):
                value = await answer
        finally:
            if self._asked.pop(call_id, None) is not None and not answer.done():
                self.connection.send(FrameKind.CANCEL, call_id)
        return request.read_answer(self.hello.name, value)

    def on_message(
        self,
        kind: int,
        _flags: int,
        call_id: int,
        _aux: int,
        _head: bytes,
        control: bytes,
        _buffers: list[memoryview],
    ) -> None:
        """Take an answer."""
        answer = self._asked.pop(call_id, None)
        if answer is None or answer.done():
            return
        if kind == FrameKind.RESPONSE:
            answer.set_result(unpacked(control))
        elif kind == FrameKind.ERROR:
            answer.set_exception(RejectedError(str(unpacked(control))))
        else:
            name = FrameKind(kind).name
            raise MalformedError(f"a {name} frame was sent to an observer")

    def on_transfer_dropped(self, kind: int, _call_id: int) -> None:
        """Refuse a dropped transfer: no peer sends a transfer to an observer."""
        name = FrameKind(kind).name
        raise MalformedError(f"a {name} transfer to an observer was dropped")

    def close(self) -> None:
        """End the connection."""
        self.connection.end(ClosedError("the observer has closed the connection"))

    def _on_ended(self) -> None:
        error: AsyncRpcError = ConnectionLostError(
            f"the connection to worker {self.hello.name!r} has ended"
        )
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked.clear()
