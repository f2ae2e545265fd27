"""A small application of our own that listens at a port while a block runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

from aiohttp import web

from asyncrpc.arguments import check_count, check_kind
from asyncrpc.errors import UsageError

_PORT_MAX: Final = 65_535
_END_S: Final = 1.0  # for requests that are being answered


def check_where(host: object, port: object) -> None:
    """Raise UsageError unless these are where a server may listen."""
    check_count("port", port, at_most=_PORT_MAX)
    check_kind("host", host, str, "an address, or an empty string")


@asynccontextmanager
async def listening(
    used: str, app: web.Application, host: str, port: int
) -> AsyncIterator[int]:
    """Serve an application; the port is that of the context.

    Args:
        used: what was called, for the error.
        app: is set up and cleaned up.
        host: address of the interface to listen at; an empty string: all of them.
        port: to listen at; 0: one that is free.

    Raises:
        UsageError: nobody can listen there.

    Cancellation:
        Nothing listens any more.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_S)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host or None, port).start()
        except (OSError, UnicodeError) as error:  # the second: no name of a host
            raise UsageError(
                f"{used} cannot listen at port {port} of host {host[:255]!r}: "
                f"{error}; another process has the port, it is not ours to take, or "
                "the host is not this one"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
