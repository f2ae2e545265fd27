"""Whatever a peer holds without credit is in one sum, which has a limit."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from asyncrpc.core.calls.peer_memory import (
    BYTE_BYTES_MAX,
    CALL_BYTES,
    PEERS,
    UNWEIGHED_CALLS_MAX,
    WATCHED_BYTES_MIN,
    PeerMemory,
)
from asyncrpc.core.options import LimitOptions, Options
from asyncrpc.core.serde import kinds
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.errors import Outcome, OverloadedError
from tests.unit.core.calls import test_requests as requests
from tests.unit.core.calls.fakes import FakeHost, Parts

LIMIT = 8 << 20


class Admission:
    def __init__(self) -> None:
        self.held_bytes = 0


def account(
    admission: Admission | None = None, calls: int = 0, services_hold: int = 0
) -> PeerMemory:
    counts: Any = admission or Admission()
    return PeerMemory(counts, dict.fromkeys(range(calls)), lambda: services_hold, LIMIT)


def test_bytes_held_by_a_peer_are_one_sum() -> None:
    memory = account(calls=100, services_hold=1 << 20)
    memory.take(1 << 20)
    memory.on_kept(2 << 20, is_pressed=False)
    assert memory.used_bytes == 100 * CALL_BYTES + (4 << 20)
    left = LIMIT - memory.used_bytes
    memory.check(left)
    with pytest.raises(OverloadedError, match="the limit is 8388608"):
        memory.check(left + 1)
    memory.take(-(1 << 20))
    memory.check(left + (1 << 20))


def test_bytes_held_by_all_peers_have_a_limit() -> None:
    admission = Admission()
    others = [account(admission) for _ in range(PEERS)]
    for other in others:
        other.take(LIMIT)
    last = account(admission)
    with pytest.raises(OverloadedError, match=f"{PEERS} times"):
        last.check(1)
    others[0].take(-LIMIT)
    last.check(LIMIT)


@pytest.mark.parametrize("is_pressed", [False, True])
def test_short_calls_are_weighed_once_a_peer_holds_much(*, is_pressed: bool) -> None:
    memory = account()
    memory.take(WATCHED_BYTES_MIN)
    assert not memory.is_watched
    if is_pressed:
        memory.on_kept(1, is_pressed=True)
    else:
        memory.take(1)
    assert memory.is_watched


class TestRequests:
    @pytest.fixture
    def link(self) -> Parts:
        limits = LimitOptions(peer_bytes_max=LIMIT)
        return Parts(FakeHost(options=Options(limits=limits)))

    @pytest.fixture(autouse=True)
    def _gate(self, link: Parts) -> None:
        requests.GATE[:] = [asyncio.Future(loop=link.host.loop)]

    def fill(
        self,
        link: Parts,
        *args: object,
        meta: object = None,
        control: bytes | None = None,
    ) -> int:
        """Make calls that wait until one is refused; return how many wait."""
        for call_id in range(1, 10_000):
            requests.ask(
                link,
                requests.hold_with,
                *args,
                call_id=call_id,
                meta=meta,
                control=control,
            )
            sent = link.connection.sent
            if sent and sent[-1].kind == FrameKind.ERROR:
                error = requests.error_of(link)
                assert isinstance(error, OverloadedError)
                assert error.outcome is Outcome.NOT_EXECUTED
                return call_id - 1
        raise AssertionError("none was refused")

    def test_few_short_calls_are_not_weighed(self, link: Parts) -> None:
        for call_id in range(1, UNWEIGHED_CALLS_MAX + 1):
            requests.ask(link, requests.hold_with, [[]] * 1000, call_id=call_id)
        assert link.memory.held_bytes == 0

    def test_held_bytes_are_released_with_the_last_holder(self, link: Parts) -> None:
        claim = link.credit.hold(link.credit.hold(None, 100), 20)
        claim.hold()
        claim.let_go()
        assert link.memory.held_bytes == 120
        claim.let_go()
        assert (link.memory.held_bytes, link.host.admission.held_bytes) == (0, 0)

    def test_lists_are_counted_once_the_account_is_half_full(self, link: Parts) -> None:
        control = kinds.FLAT + msgpack.packb([[[[]] * 1000], {}])
        held = self.fill(link, control=control)
        most = LIMIT // (1000 * BYTE_BYTES_MAX)
        assert 0.8 * most < held - UNWEIGHED_CALLS_MAX < most

    def test_request_head_counts(self, link: Parts) -> None:
        assert self.fill(link, meta={"zz": "x" * 30_000}) < 16

    def test_long_request_is_always_counted(self, link: Parts) -> None:
        link.credit.account.window = 1 << 30
        requests.ask(link, requests.hold_with, list(range(10_000)))
        assert 10_000 * 64 <= link.memory.held_bytes < 12_000 * 64
