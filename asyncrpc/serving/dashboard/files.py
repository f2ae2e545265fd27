"""The files of the page: read once, in a thread, and served from memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from aiohttp import web

STATIC: Final = Path(__file__).parent / "static"
PAGE: Final = "index.html"
_KINDS: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}


class PageFiles:
    """The files, by their names below `static/`."""

    def __init__(self) -> None:
        self._by_name: dict[str, bytes] | None = None

    async def response(self, name: str) -> web.Response:
        """Return a file."""
        if self._by_name is None:
            self._by_name = await asyncio.to_thread(_read_all)
        body = self._by_name.get(name)
        if body is None:
            raise web.HTTPNotFound(text="there is no such file\n")
        kind = _KINDS[Path(name).suffix]
        charset = None if kind == "image/svg+xml" else "utf-8"
        return web.Response(body=body, content_type=kind, charset=charset)


def _read_all() -> dict[str, bytes]:
    return {
        path.relative_to(STATIC).as_posix(): path.read_bytes()
        for path in STATIC.rglob("*")
        if path.suffix in _KINDS
    }
