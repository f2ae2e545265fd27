"""A browser of the dashboard, as far as HTTP goes, and what workers do meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import torch

GENEROUS_S: Final = 60.0


async def wait() -> None:
    """Wait until the caller gives up."""
    await asyncio.get_running_loop().create_future()


class Held:
    """A value that is referred to."""

    def rows(self) -> torch.Tensor:
        return torch.ones(2)


def token_of(key: str) -> str:
    """Return the token of who knows a secret, as the page makes it."""
    return hmac.new(key.encode(), b"asyncrpc dashboard", hashlib.sha256).hexdigest()


class Browser:
    """One browser: its cookies, and the directory that the dashboard is at.

    Attributes:
        session: of aiohttp.
    """

    def __init__(self, session: aiohttp.ClientSession, at: str = "/") -> None:
        self.session = session
        self._at = at

    def url(self, path: str) -> str:
        return self._at + path

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        """Return the status of an answer, and its JSON."""
        async with self.session.get(self.url(path), headers=headers) as answer:
            return answer.status, await answer.json()

    async def look(self, path: str, **headers: str) -> Any:
        """Return a look that must be there."""
        status, look = await self.get(f"api/{path}", **headers)
        assert status == 200, look
        return look

    async def post(self, path: str, content: Any) -> tuple[int, Any]:
        async with self.session.post(self.url(path), json=content) as answer:
            return answer.status, await answer.json()

    async def sign_in(self, key: str) -> int:
        """Sign in as the page does; return the status."""
        status, _ = await self.post("login", {"token": token_of(key)})
        return status

    @asynccontextmanager
    async def live(self, path: str, **headers: str) -> AsyncIterator[Events]:
        """Open a stream."""
        url = self.url(f"api/{path}")
        limit = aiohttp.ClientTimeout(total=None)
        async with self.session.get(url, headers=headers, timeout=limit) as answer:
            assert answer.status == 200, await answer.text()
            assert answer.content_type == "text/event-stream"
            yield Events(answer.content)


class Events:
    """The events of one stream."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    async def next(self) -> tuple[str, Any]:
        """Return the name and the data of the next event; ("", None) at the end."""
        name = ""
        async with asyncio.timeout(GENEROUS_S):
            while line := (await self._content.readline()).decode():
                if line.startswith("event: "):
                    name = line.removeprefix("event: ").strip()
                elif line.startswith("data: "):
                    return name, json.loads(line.removeprefix("data: "))
        return "", None

    async def look(self) -> Any:
        """Return the next look, which must be one."""
        name, look = await self.next()
        assert name == "look", (name, look)
        return look

    async def until_end(self) -> None:
        """Read on until the stream ends."""
        while (await self.next())[0]:
            pass
