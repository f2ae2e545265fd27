"""Few descriptors in this process; strangers and newcomers that another one makes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import resource
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

from asyncrpc import Options, Worker, current_worker
from asyncrpc.functions import on_loop
from tests.integration.core import remote

_strangers: list[socket.socket] = []
_limits = contextlib.ExitStack()


@contextlib.contextmanager
def descriptors_left(count: int) -> Iterator[None]:
    """Let this process open so many more descriptors while the block runs."""
    free = (number for number in range(1 << 20) if not _is_open(number))
    limit = next(itertools.islice(free, count, None))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def come(address: str, count: int) -> int:
    """Connect so many silent sockets; return how many have."""
    url, loop = urlsplit(address), asyncio.get_running_loop()
    for _ in range(count):
        is_unix = url.scheme == "uds"
        sock = socket.socket(socket.AF_UNIX if is_unix else socket.AF_INET)
        sock.settimeout(0)
        _strangers.append(sock)
        where = url.path if is_unix else (url.hostname, url.port)
        while True:
            try:
                await loop.sock_connect(sock, where)
            except BlockingIOError:  # the queue of a Unix socket is full
                await asyncio.sleep(0)
            else:
                break
    return len(_strangers)


def go() -> None:
    """Close what `come` has connected."""
    for sock in _strangers:
        sock.close()
    _strangers.clear()


async def ask_as_newcomer(
    addresses: tuple[str, ...], options: Options, number: int
) -> int:
    """Start a worker that calls 'a', and end it."""
    name = f"newcomer{number}"
    where = {name: "tcp://127.0.0.1:9", "a": addresses}
    async with Worker(name, rendezvous=where, options=options) as worker:
        return await worker.peer("a").call(remote.add, number)


async def ask_as_member(number: int) -> int:
    """Call 'a' by the worker that runs this function."""
    return await current_worker().peer("a").call(remote.add, number)


@on_loop
def limit(count: int) -> None:
    """Let this process open so many more descriptors until `lift`."""
    _limits.enter_context(descriptors_left(count))


@on_loop
def lift() -> None:
    _limits.close()


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
