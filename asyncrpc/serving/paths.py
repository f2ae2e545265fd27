"""Paths that a program chooses for routes of asyncrpc."""

from __future__ import annotations

from asyncrpc.core.arguments import wrong


def check_path(name: str, path: object) -> None:
    """Raise UsageError unless an argument is a path of a URL."""
    if not isinstance(path, str) or not path.startswith("/"):
        raise wrong(name, "a path that begins with '/'", path)
