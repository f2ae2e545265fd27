"""Serves a small application of asyncrpc at a port while a block runs."""

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
    """Raise UsageError unless these are a host and a port to listen at."""
    check_count("port", port, at_most=_PORT_MAX)
    check_kind("host", host, str, "an address, or an empty string")


@asynccontextmanager
async def listening(
    used: str, app: web.Application, host: str, port: int
) -> AsyncIterator[int]:
    """Serve an application; the value of the context is the port.

    Args:
        used: the called function, for the error.
        app: is set up and cleaned up.
        host: address of the interface to listen at; an empty string: all of them.
        port: to listen at; 0: a free one.

    Raises:
        UsageError: the application cannot listen at this host and port.

    Cancellation:
        The application no longer listens.
    """
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_END_S)
    try:
        await runner.setup()
        try:
            await web.TCPSite(runner, host or None, port).start()
        except (OSError, UnicodeError) as error:  # the second: not a host name
            raise UsageError(
                f"{used} cannot listen at port {port} of host {host[:255]!r}: "
                f"{error}; the port is in use, needs more privileges, or the address "
                "is not of this host"
            ) from error
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
