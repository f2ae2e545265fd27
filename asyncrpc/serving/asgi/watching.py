"""Watches a connection of ASGI, and cancels the application if its client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

from asyncrpc.serving.asgi.machine.connection import AsgiConnection, AsgiState
from asyncrpc.serving.asgi.protocol import (
    AsgiMessage,
    AsgiReceive,
    AsgiScope,
    AsgiSend,
)
from asyncrpc.serving.client_scope import ClientScope, beside
from asyncrpc.serving.machine.error_answers import CLIENT_LEFT_STATUS


class WatchedConnection:
    """Replaces a server's `receive` and `send` for the application.

    Attributes:
        on_answered: called once the answer is complete.
    """

    def __init__(self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend) -> None:
        self.connection = AsgiConnection(scope)
        self.on_answered: Callable[[], None] = lambda: None
        self._receive = receive
        self._send = send
        self._changed = asyncio.Event()  # a message has come, or one may be read
        self._failure: Exception | None = None

    @asynccontextmanager
    async def watching(self, *, cancels: bool) -> AsyncIterator[None]:
        """Cancel the block when the client leaves; it ends as if it had returned.

        Args:
            cancels: whether to cancel; False: only note that the client has left.
        """
        client = ClientScope()
        leave = client.leave if cancels else lambda: None
        async with client, beside(self._read_ahead(leave)):
            yield

    async def receive(self) -> AsgiMessage:
        """Return the next message of the client."""
        if self.connection.asks():
            self._notify()
        try:
            while (message := self.connection.take()) is None:
                if self._failure is not None:
                    raise self._failure
                await self._wait()
            return message
        finally:
            self.connection.asks_no_more()
            self._notify()

    async def send(self, message: AsgiMessage) -> None:
        """Send a message to the client."""
        self.connection.sends(message)
        await self._send(message)
        if self.connection.state is AsgiState.ANSWERED:
            self.on_answered()

    async def answer_nobody(self) -> None:
        """Give a request without an answer one, which its client will not read.

        The client has left.  Servers drop the answer, but a middleware outside of ours
        (Starlette's BaseHTTPMiddleware) takes it for an error if none comes.
        """
        head = {"status": CLIENT_LEFT_STATUS, "headers": []}
        with suppress(Exception):  # as of ASGI 2.4, if the server sees it first
            await self._send({"type": "http.response.start", **head})
            await self._send({"type": "http.response.body", "body": b""})

    async def _read_ahead(self, leave: Callable[[], None]) -> None:
        try:
            while True:
                while not self.connection.may_read:
                    await self._wait()
                if self.connection.received(await self._receive()):
                    leave()
                self._notify()
        except Exception as error:  # noqa: BLE001  (raised in the application)
            self._failure = error
            self._notify()

    async def _wait(self) -> None:
        """Wait for a change; any number of tasks may wait."""
        await self._changed.wait()

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
