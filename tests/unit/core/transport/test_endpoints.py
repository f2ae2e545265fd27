"""Names are looked up without blocking, and the first of their addresses wins."""

from __future__ import annotations

import asyncio
import errno
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from asyncrpc.core.transport import endpoints
from asyncrpc.core.transport.endpoints import (
    LOOKUPS_MAX,
    Endpoint,
    Resolver,
    connected_socket,
    reason_of,
)


@pytest.fixture
def listening() -> Iterator[Endpoint]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Endpoint(*server.getsockname())


def closed() -> Endpoint:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return Endpoint(*server.getsockname())


async def test_numeric_addresses_are_not_looked_up() -> None:
    assert await Resolver().resolve("10.0.0.1", 7) == [Endpoint("10.0.0.1", 7)]
    assert str(Endpoint("::1", 7)) == "[::1]:7"


async def test_unresolvable_name_is_an_error_of_the_lookup() -> None:
    with pytest.raises(socket.gaierror) as caught:
        await Resolver().resolve("a" * 70 + ".x", 1)
    assert reason_of(caught.value).startswith("the name does not resolve")


async def test_hanging_lookup_can_be_cancelled_and_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever gives up is free; who asks for the same name joins the lookup."""
    answer, looked_up = threading.Event(), []

    def look_up(host: str) -> list[str]:
        looked_up.append(host)
        answer.wait(30.0)
        return ["10.0.0.9"]

    monkeypatch.setattr(endpoints, "_addresses_of", look_up)
    resolver = Resolver()
    first = asyncio.create_task(resolver.resolve("slow", 1))
    await asyncio.sleep(0)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    second = asyncio.create_task(resolver.resolve("slow", 2))
    await asyncio.sleep(0)
    answer.set()
    assert await second == [Endpoint("10.0.0.9", 2)]
    assert looked_up == ["slow"]


async def test_lookups_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = threading.Event()
    most, now, lock = 0, 0, threading.Lock()

    def look_up(host: str) -> list[str]:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        answer.wait(30.0)
        with lock:
            now -= 1
        return [host]

    monkeypatch.setattr(endpoints, "_addresses_of", look_up)
    resolver = Resolver()
    names = [f"host-{number}" for number in range(3 * LOOKUPS_MAX)]
    tasks = [asyncio.create_task(resolver.resolve(name, 1)) for name in names]
    await asyncio.sleep(0)
    answer.set()
    endpoints_found = await asyncio.gather(*tasks)
    assert [endpoint.host for (endpoint,) in endpoints_found] == names
    assert most <= LOOKUPS_MAX


async def test_refusing_address_gives_way_at_once(listening: Endpoint) -> None:
    with await connected_socket([closed(), listening]) as sock:
        assert sock.getpeername() == (listening.host, listening.port)


async def test_silent_address_gives_way_after_the_stagger(listening: Endpoint) -> None:
    with ExitStack() as stack:
        deaf = stack.enter_context(socket.socket())
        deaf.bind(("127.0.0.1", 0))
        deaf.listen(0)
        for _ in range(3):  # its queue is full with these
            caller = stack.enter_context(socket.socket())
            caller.settimeout(0)
            caller.connect_ex(deaf.getsockname())
        silent = Endpoint(*deaf.getsockname())
        with await connected_socket([silent, listening]) as sock:
            assert sock.getpeername() == (listening.host, listening.port)


async def test_refusing_addresses_are_all_listed() -> None:
    first, other = closed(), closed()
    with pytest.raises(ConnectionRefusedError) as caught:
        await connected_socket([first, other])
    for endpoint in {first, other}:
        assert f"{endpoint}: refused: no process listens there" in reason_of(
            caught.value
        )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route (No route to"),
        (ConnectionResetError(errno.ECONNRESET, "reset"), "cut off (reset)"),
        (TimeoutError(), "silent: no answer"),
        (OSError(errno.EACCES, "Permission denied"), "Permission denied"),
        (ValueError("no"), "no"),
    ],
)
def test_reasons_are_in_words(error: Exception, words: str) -> None:
    assert reason_of(error).startswith(words)
