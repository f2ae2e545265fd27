"""Strangers are limited in number and in time; who has proved itself stays."""

from __future__ import annotations

import asyncio
import logging
import resource
from typing import Any

import pytest

from asyncrpc.core.counters import Counters
from asyncrpc.core.links.admission import Admission
from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.wire.messages import Hello
from asyncrpc.errors import (
    AsyncRpcError,
    AuthenticationError,
    MalformedError,
)
from asyncrpc.testing.network import Network
from tests.unit.core.links.directories import Host, run

HELLO = Hello("z", 1, -1, 1)


class Stranger:
    """A connection that does nothing by itself."""

    where = "somewhere"

    def __init__(self) -> None:
        self.opened: asyncio.Future[Hello] = asyncio.get_running_loop().create_future()
        self.has_proved = False
        self.reads = 0
        self.stream = ByteStream(asyncio.get_running_loop(), None)
        self.failed = ""

    def fail(self, error: AsyncRpcError) -> None:
        self.failed = str(error)
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()


def door(*, at_most: int = 2) -> tuple[Any, Counters]:
    host = Host(Network(1), "a", 1)
    identity: Any = host
    admission = Admission(
        identity, host.loop, host.counters, handshakes_max=at_most, timeout_s=5.0
    )
    return admission, host.counters


def test_slow_stranger_is_dropped() -> None:
    async def main() -> None:
        admission, counters = door()
        stranger = Stranger()
        admission.admit(stranger)
        await asyncio.sleep(4.9)
        assert len(admission) == 1
        await asyncio.sleep(0.2)
        assert stranger.failed == "somewhere did not introduce itself in 5 s"
        assert counters.connections_dropped_unauthenticated == 1
        assert not len(admission)

    run(main())


def test_introduced_stranger_leaves_the_waiting_list() -> None:
    async def main() -> None:
        admission, _ = door()
        stranger = Stranger()
        admission.admit(stranger)
        stranger.opened.set_result(HELLO)
        await asyncio.sleep(10.0)
        assert not stranger.failed
        assert not len(admission)

    run(main())


def test_oldest_unproved_connection_is_dropped_when_too_many_wait() -> None:
    async def main() -> None:
        admission, _ = door()
        proved, unproved, newest = Stranger(), Stranger(), Stranger()
        proved.has_proved = True
        for stranger in (proved, unproved, newest):
            admission.admit(stranger)
        assert [bool(stranger.failed) for stranger in (proved, unproved, newest)] == [
            False,
            True,
            False,
        ]
        assert "see LimitOptions.handshakes_max" in unproved.failed

    run(main())


def test_oldest_silent_connection_is_dropped_first() -> None:
    async def main() -> None:
        admission, _ = door(at_most=3)
        speaking, silent, newest = Stranger(), Stranger(), Stranger()
        speaking.reads = 1
        for stranger in (speaking, silent, newest, Stranger()):
            admission.admit(stranger)
        assert [bool(stranger.failed) for stranger in (speaking, silent, newest)] == [
            False,
            True,
            False,
        ]
        assert admission.make_room()
        assert newest.failed
        assert not speaking.failed

    run(main())


def test_proved_connections_make_no_room() -> None:
    async def main() -> None:
        admission, _ = door()
        proved = Stranger()
        proved.has_proved = True
        admission.admit(proved)
        assert not admission.make_room()
        assert not proved.failed

    run(main())


def test_strangers_have_a_quarter_of_the_descriptors(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        admission, _ = door(at_most=256)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (12, hard))
        try:
            for _ in range(9):
                admission.admit(Stranger())
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(admission) == 12 // 4

    with caplog.at_level(logging.WARNING, "asyncrpc"):
        run(main())
    assert len(caplog.records) == 1  # of six that were closed
    assert "only 3 of the 12 file descriptors" in caplog.text


def test_newest_connection_is_dropped_if_all_others_have_proved() -> None:
    async def main() -> None:
        admission, _ = door(at_most=1)
        proved, newest = Stranger(), Stranger()
        proved.has_proved = True
        admission.admit(proved)
        admission.admit(newest)
        assert not proved.failed
        assert newest.failed

    run(main())


def test_refused_strangers_are_counted_and_logged_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        admission, counters = door(at_most=99)
        for error in (AuthenticationError("no"), MalformedError("what?")) * 3:
            stranger = Stranger()
            admission.admit(stranger)
            stranger.fail(error)
        await asyncio.sleep(0)
        assert counters.authentications_failed == counters.handshakes_refused == 3
        assert len(caplog.records) == 1
        await asyncio.sleep(2.0)
        stranger = Stranger()
        admission.admit(stranger)
        stranger.fail(AuthenticationError("no"))
        await asyncio.sleep(0)
        assert "(5 more before it)" in caplog.records[-1].getMessage()

    with caplog.at_level(logging.WARNING, "asyncrpc"):
        run(main())
