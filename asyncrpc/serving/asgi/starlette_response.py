"""A response that handlers of Starlette and FastAPI can return.

FastAPI turns any value that is not a `starlette.responses.Response` into JSON.
"""

from __future__ import annotations

from typing import Protocol

from starlette.responses import Response

from asyncrpc.serving.asgi.machine.connection import AsgiReceive, AsgiScope, AsgiSend


class ResponseApplication(Protocol):
    """An ASGI application that sends a response with these headers."""

    raw_headers: list[tuple[bytes, bytes]]

    async def __call__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Send the response."""


class StarletteResponse(Response):
    """A response whose body an ASGI application sends."""

    def __init__(self, application: ResponseApplication) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self.raw_headers = application.raw_headers
        self._application = application

    async def __call__(
        self, scope: AsgiScope, receive: AsgiReceive, send: AsgiSend
    ) -> None:
        """Send the response; the framework calls it."""
        await self._application(scope, receive, send)
        if self.background is not None:
            await self.background()
