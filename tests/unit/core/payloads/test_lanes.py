"""Lanes alone: both ends of a connection and of its lanes, and no worker."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from functools import partial

import pytest
import pytest_asyncio

from asyncrpc.core.links.connection import Connection
from asyncrpc.core.payloads.lanes import Lanes
from asyncrpc.core.payloads.machine.lanes import (
    QUIET_TURN_BYTES,
    TURN_BYTES,
    LanesState,
)
from asyncrpc.core.transport.abc import Buffer
from asyncrpc.core.wire.chunks import Arrivals
from asyncrpc.core.wire.frames import (
    CHUNK_BYTES,
    HEADER_BYTES,
    FrameKind,
    Hello,
    prefix,
)
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.resume import LANE_ACK_BYTES
from asyncrpc.errors import ConnectError, MalformedError
from asyncrpc.testing.loop import SimLoop
from tests.unit.core.links.pair import Both, Line, Side, join

CLOSE_BYTES = len(prefix(FrameKind.CLOSE, 1))
LARGE = bytes(range(256)) * (3 * CHUNK_BYTES // 256 + 5)


class Laned(Both):
    """Two sides with lanes, which are opened when the test says so.

    Attributes:
        asked: how many lanes the dialer was to open.
        dialing: done when it has opened them.
        lines: the transports of the lanes, the dialer's ends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0
        self.dialing: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.lines: list[Line] = []
        self.redialed: list[tuple[Connection, int]] = []

    def prepare(self) -> None:
        for side in (self.a, self.b):
            side.connection.prepare_lanes(partial(self._make_lanes, side))

    def _make_lanes(self, side: Side, arrivals: Arrivals) -> Lanes:
        return Lanes(
            side.connection,
            arrivals,
            loop=asyncio.get_running_loop(),
            wanted=2,
            is_on_host=False,
            dial=self._dial if side is self.a else None,
            redial=self._redial,
            start_task=asyncio.create_task,
        )

    async def _dial(self, count: int) -> None:
        self.asked = count
        await self.dialing

    def _redial(self, lane: Connection, attempt: int) -> None:
        self.redialed.append((lane, attempt))

    def open_lane(self) -> Connection:
        """Open one lane at both ends; return the dialer's."""
        dialer, _ = self.offer_lane()
        while self.lines[-1].deliver() + self.lines[-1].other.deliver():
            pass
        return dialer

    def offer_lane(self) -> tuple[Connection, Connection]:
        """Open a lane where it is accepted; its dialer has no answer yet."""
        dialer, acceptor = (
            self._lane(self.a, Role.DIALER),
            self._lane(self.b, Role.ACCEPTOR),
        )
        line = join(dialer, acceptor)
        self.lines.append(line)
        line.deliver()
        line.other.deliver()
        line.deliver()
        return dialer, acceptor

    def _lane(self, side: Side, role: Role) -> Connection:
        def introduce(connection: Connection) -> None:
            if role is Role.DIALER:
                connection.hello(side.hello(lane=1))

        def on_hello(connection: Connection, _: Hello) -> None:
            if role is Role.ACCEPTOR:
                connection.hello(side.hello())
            lanes_of(side).attach(connection)

        return Connection(
            Handshake(role, b"secret", os.urandom(NONCE_BYTES)),
            loop=asyncio.get_running_loop(),
            limits=MessageLimits(),
            introduce=introduce,
            on_hello=on_hello,
        )

    async def settle(self) -> None:
        idle = 0
        while idle < 3:
            await asyncio.sleep(0)
            lines = (self.line, *self.lines)
            ends = [end for line in lines for end in (line, line.other)]
            idle = 0 if sum(end.deliver() for end in ends) else idle + 1


def lanes_of(side: Side) -> Lanes:
    assert side.connection.lanes is not None
    return side.connection.lanes


def states(both: Laned) -> tuple[LanesState, LanesState]:
    return lanes_of(both.a).state, lanes_of(both.b).state


@pytest_asyncio.fixture
async def both() -> AsyncIterator[Laned]:
    laned = Laned()
    await laned.settle()
    laned.prepare()
    yield laned
    await laned.end()
    if not laned.dialing.done():
        laned.dialing.set_result(None)
    await asyncio.sleep(0)
    await asyncio.sleep(0)


class TestOpening:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_small_payload_opens_no_lane(self, both: Laned) -> None:
        both.a.send(1, b"", LARGE[:60_000])
        await both.settle()
        assert states(both) == (LanesState.NONE, LanesState.NONE)

    async def test_large_payloads_wait_for_the_first_lane(self, both: Laned) -> None:
        both.a.send(1, b"one", LARGE)
        both.a.send(2, b"small")
        await both.settle()
        assert both.asked == 2
        assert both.b.messages == [(2, b"small", b"")]
        both.open_lane()
        assert states(both) == (LanesState.UP, LanesState.UP)
        await both.settle()
        assert both.b.messages[1:] == [(1, b"one", LARGE)]

    async def test_large_payloads_wait_a_limited_time(self, both: Laned) -> None:
        both.a.send(1, b"", LARGE)
        await asyncio.sleep(1.01)  # virtual
        assert lanes_of(both.a).state is LanesState.LATE
        both.a.send(2, b"", LARGE)
        await both.settle()
        assert sorted(both.b.messages) == [(1, b"", LARGE), (2, b"", LARGE)]
        both.open_lane()
        assert lanes_of(both.a).state is LanesState.UP

    async def test_late_lane_takes_the_rest_of_a_payload(self, both: Laned) -> None:
        both.line.handler.pause_writing()
        both.a.send(1, b"", LARGE)
        await asyncio.sleep(1.01)  # virtual
        await both.settle()
        assert lanes_of(both.b).arrivals.opened == 1
        assert both.b.messages == []
        both.open_lane()
        await both.settle()
        assert both.b.messages == [(1, b"", LARGE)]

    async def test_large_payloads_take_the_connection_if_no_lane_opens(
        self, both: Laned
    ) -> None:
        both.a.send(1, b"", LARGE)
        await both.settle()
        both.dialing.set_exception(ConnectError("a wall"))
        await both.settle()
        assert states(both) == (LanesState.OFF, LanesState.OFF)
        assert both.b.messages == [(1, b"", LARGE)]

    async def test_accepting_side_asks_for_lanes(self, both: Laned) -> None:
        both.b.send(1, b"", LARGE)
        await both.settle()
        assert both.asked == 2
        both.open_lane()
        await both.settle()
        assert both.a.messages == [(1, b"", LARGE)]

    async def test_malformed_lane_request_is_refused(self, both: Laned) -> None:
        with pytest.raises(MalformedError, match="at least 1 lane, not 0"):
            lanes_of(both.a).on_asked(0)
        with pytest.raises(MalformedError, match="from the side that dials must be 0"):
            lanes_of(both.b).on_asked(1)

    async def test_payload_dropped_while_lanes_open_is_never_sent(
        self, both: Laned
    ) -> None:
        both.a.send(1, b"", LARGE)
        assert both.a.connection.drop(FrameKind.REQUEST, 1)
        both.open_lane()
        await both.settle()
        assert both.b.messages == []
        assert lanes_of(both.b).arrivals.opened == 0

    async def test_accepting_side_waits_for_sign_of_dialer(self, both: Laned) -> None:
        both.offer_lane()
        both.b.send(1, b"", LARGE)
        assert states(both) == (LanesState.NONE, LanesState.OPENING)
        await both.settle()
        assert states(both) == (LanesState.UP, LanesState.UP)
        assert both.a.messages == [(1, b"", LARGE)]

    async def test_lane_unknown_to_the_dialer_is_dropped(self, both: Laned) -> None:
        _, acceptor = both.offer_lane()
        acceptor.resumption.break_off("cut")
        both.b.send(1, b"", LARGE)
        both.open_lane()
        await both.settle()
        assert both.a.messages == [(1, b"", LARGE)]
        assert both.b.broken == both.b.lost == []
        assert not acceptor.ended.done()  # the dialer may have had it
        await both.end()
        assert acceptor.ended.done()

    async def test_lane_known_to_the_dialer_is_resumed(self, both: Laned) -> None:
        dialer, acceptor = both.offer_lane()
        both.lines[-1].other.deliver()  # the answer
        acceptor.resumption.break_off("cut")
        assert both.b.broken == []
        await both.settle()
        assert both.b.broken == ["mem://other: cut"]
        assert dialer.token == acceptor.token


class TestSending:
    loops = {"sim": SimLoop}  # noqa: RUF012

    async def test_many_payloads_arrive_over_several_lanes_both_ways(
        self, both: Laned
    ) -> None:
        for _ in range(3):
            both.open_lane()
        for call_id in range(5):
            both.a.send(call_id, b"to b", LARGE[call_id:])
            both.b.send(call_id, b"to a", LARGE[call_id:])
        await both.settle()
        expected = [(at, LARGE[at:]) for at in range(5)]
        assert sorted((at, payload) for at, _, payload in both.b.messages) == expected
        assert sorted((at, payload) for at, _, payload in both.a.messages) == expected

    async def test_acks_of_a_payload_do_not_count_as_small_messages(
        self, both: Laned
    ) -> None:
        """They come for each 8 MiB, and would keep the turns short."""
        both.open_lane()
        pump, lanes = both.a.connection.pump, lanes_of(both.a)
        ration, on_ack = pump.ration, lanes.on_ack
        rations, acks = list[int](), list[int]()

        def note_ration() -> int:
            rations.append(ration())
            return rations[-1]

        def note_ack(token: int, received: int) -> None:
            acks.append(received)
            on_ack(token, received)

        pump.ration, lanes.on_ack = note_ration, note_ack  # type: ignore[method-assign]
        payload = bytes(8 * LANE_ACK_BYTES)
        both.a.send(1, b"", payload)
        await both.settle()
        assert both.b.messages == [(1, b"", payload)]
        assert len(acks) > 4
        assert set(rations) == {QUIET_TURN_BYTES}

    async def test_whole_chunk_takes_one_write_and_two_reads(self, both: Laned) -> None:
        """Its header is not counted, which would leave 40 bytes for a third."""
        lane = both.open_lane()
        line = both.lines[-1]
        written, read = list[int](), list[int]()
        send, updated = line.send, line.other.handler.buffer_updated

        def note_send(buffers: Sequence[Buffer]) -> None:
            written.append(sum(map(len, buffers)))
            send(buffers)

        def note_read(nbytes: int) -> None:
            read.append(nbytes)
            updated(nbytes)

        line.send = note_send  # type: ignore[method-assign]
        line.other.handler.buffer_updated = note_read  # type: ignore[method-assign]
        payload = bytes(4 * CHUNK_BYTES)
        both.a.send(1, b"", payload)
        await both.settle()
        assert both.b.messages == [(1, b"", payload)]
        assert written == [HEADER_BYTES + CHUNK_BYTES] * 4
        assert read[-6:] == [HEADER_BYTES, CHUNK_BYTES] * 3  # reads begin shorter
        assert not lane.is_broken

    @pytest.mark.parametrize("limit_bytes", [TURN_BYTES, TURN_BYTES - HEADER_BYTES])
    async def test_turn_leaves_no_rest_shorter_than_a_header(
        self, both: Laned, limit_bytes: int
    ) -> None:
        both.open_lane()
        (lane,) = lanes_of(both.a).lanes
        lane.rest.extend((bytes(HEADER_BYTES), memoryview(bytes(CHUNK_BYTES))))
        written = []
        while lane.rest:
            written.append(lane.write(limit_bytes))
        assert sum(written) == HEADER_BYTES + CHUNK_BYTES
        assert min(written) > HEADER_BYTES
        assert max(written) <= limit_bytes + HEADER_BYTES

    async def test_chunks_may_come_before_their_message(self, both: Laned) -> None:
        both.open_lane()
        both.a.send(1, b"", LARGE)
        await asyncio.sleep(0)
        both.lines[0].deliver()
        assert both.b.messages == []
        await both.settle()
        assert both.b.messages == [(1, b"", LARGE)]

    async def test_lane_is_resumed_as_a_connection_is(self, both: Laned) -> None:
        lane = both.open_lane()
        both.a.send(1, b"", LARGE)
        await asyncio.sleep(0)
        lane.resumption.break_off("nothing comes over it")
        assert lane.is_broken
        assert both.a.broken == ["mem://other: nothing comes over it"]
        assert states(both) == (LanesState.UP, LanesState.NONE)


class TestTheEnd:
    loops = {"sim": SimLoop}  # noqa: RUF012

    async def test_lane_that_ends_inside_a_payload_ends_the_connection(
        self, both: Laned
    ) -> None:
        lane = both.open_lane()
        both.a.send(1, b"", LARGE)
        lane.fail(ConnectError("cut"))
        await both.settle()
        assert both.a.lost == ["a lane to mem://other broke: cut"]

    async def test_lanes_closed_in_order_leave_connection(self, both: Laned) -> None:
        both.open_lane()
        both.a.send(1, b"", LARGE)
        closing = asyncio.create_task(lanes_of(both.a).close())
        await both.settle()
        await closing
        assert both.b.messages == [(1, b"", LARGE)]
        assert both.a.lost == both.b.lost == []
        assert lanes_of(both.a).state is LanesState.OFF

    async def test_lane_announces_its_close_before_its_end(self, both: Laned) -> None:
        both.open_lane()
        both.open_lane()
        await both.settle()
        both.line.sent.clear()
        lengths: list[int] = []
        for line in both.lines:
            line.close = lambda: lengths.append(len(both.line.sent))  # type: ignore[method-assign]
        for lane in lanes_of(both.a).lanes:
            lane.connection.close()
        assert lengths == [CLOSE_BYTES, 2 * CLOSE_BYTES]

    async def test_lane_closed_by_this_end_is_not_dialed_again(
        self, both: Laned
    ) -> None:
        """To the peer it looks broken, if its end overtakes the word of it."""
        lane, other = both.open_lane(), both.open_lane()
        lanes_of(both.a).on_peer_broken(other.token, 1)
        assert both.redialed == [(other, 1)]
        line = both.lines[0]
        close = line.close

        def close_as_the_peer_says() -> None:
            assert lanes_of(both.a).connection_of(lane.token) is lane
            lanes_of(both.a).on_peer_broken(lane.token, 1)
            close()

        line.close = close_as_the_peer_says  # type: ignore[method-assign]
        closing = asyncio.create_task(lanes_of(both.a).close())
        await both.settle()
        await closing
        assert both.redialed == [(other, 1)]
        assert both.a.lost == both.b.lost == []

    async def test_ended_connection_ends_its_lanes(self, both: Laned) -> None:
        lane = both.open_lane()
        sent: list[bool] = []
        both.a.connection.send(
            FrameKind.REQUEST,
            1,
            buffers=[memoryview(LARGE)],
            on_sent=lambda: sent.append(True),
        )
        both.a.connection.end(ConnectError("over"))
        await asyncio.sleep(0)
        assert lane.ended.done()
        assert sent == [True]
        assert lanes_of(both.a).state is LanesState.CLOSED
