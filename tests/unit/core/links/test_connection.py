"""A connection alone: no worker, no link, and bytes that move when the test says so."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from asyncrpc.core.calls.deferred import PendingBuffers
from asyncrpc.core.links.connection import Connection, ConnectionState
from asyncrpc.core.links.disconnected import DISCONNECTED_BYTES_MAX
from asyncrpc.core.wire.frames import CHUNK_BYTES, FrameKind
from asyncrpc.core.wire.handshake import NONCE_BYTES, Handshake, Role
from asyncrpc.core.wire.limits import MessageLimits
from asyncrpc.core.wire.resume import ACK_BYTES, NEVER
from asyncrpc.errors import (
    AuthenticationError,
    ClosedError,
    ConnectionLostError,
    MalformedError,
)
from asyncrpc.testing.loop import SimLoop
from tests.unit.core.links.pair import REFUSED, Both, join, opened

LARGE = bytes(range(256)) * (2 * CHUNK_BYTES // 256 + 7)


@pytest_asyncio.fixture
async def both() -> AsyncIterator[Both]:
    pair = await opened()
    yield pair
    await pair.end()


def state_of(both: Both) -> tuple[ConnectionState, ConnectionState]:
    return both.a.connection.state, both.b.connection.state


class TestOpening:
    loops = {"sim": SimLoop}  # noqa: RUF012  (read once, by the conftest)

    async def test_both_ends_learn_the_name_of_the_other(self, both: Both) -> None:
        assert state_of(both) == (ConnectionState.OPEN,) * 2
        assert (await both.a.connection.until_open()).name == "b"
        assert (await both.b.connection.until_open()).name == "a"
        assert both.a.connection.token == both.b.connection.token

    async def test_handshake_may_arrive_byte_by_byte(self) -> None:
        both = Both()
        while both.line.deliver(1) + both.line.other.deliver(1):
            pass
        assert state_of(both) == (ConnectionState.OPEN,) * 2
        await both.end()

    @pytest.mark.parametrize("side", ["a", "b"])
    async def test_end_before_the_opening_fails_its_waiters(self, side: str) -> None:
        both = Both()
        both.line.deliver(50)
        await both.cut()
        connection: Connection = getattr(both, side).connection
        with pytest.raises(ConnectionLostError, match="cut"):
            await connection.until_open()
        assert connection.ended.done()
        assert getattr(both, side).broken == []

    async def test_peer_with_another_secret_is_refused_and_informed(self) -> None:
        def nothing(*_: object) -> None:
            raise AssertionError

        ends = [
            Connection(
                Handshake(role, secret, os.urandom(NONCE_BYTES)),
                loop=asyncio.get_running_loop(),
                limits=MessageLimits(),
                introduce=lambda _: None,
                on_hello=nothing,
            )
            for role, secret in ((Role.DIALER, b"one"), (Role.ACCEPTOR, b"other"))
        ]
        line = join(*ends)
        while line.deliver() + line.other.deliver():
            pass
        await asyncio.sleep(0)
        for end in ends:
            with pytest.raises(AuthenticationError, match="different secrets"):
                await end.until_open()

    async def test_message_before_the_hello_ends_the_connection(self) -> None:
        both = Both()
        both.line.deliver(40)
        both.line.other.deliver()
        both.a.connection.send(FrameKind.REQUEST, 1)  # after the dialer's HELLO
        both.b.connection.open_to = lambda _: None  # type: ignore[method-assign, assignment]
        await both.turn()
        both.line.deliver()
        await both.turn()
        with pytest.raises(MalformedError, match="a REQUEST came before the HELLO"):
            await both.b.connection.until_open()

    async def test_connection_failed_before_its_transport_ends_on_it(self) -> None:
        both = Both()
        late = both.a.make(Role.DIALER)
        late.fail(ClosedError("too late"))
        join(late, both.b.make(Role.ACCEPTOR))
        await both.turn()
        with pytest.raises(ClosedError, match="too late"):
            await late.until_open()
        await both.end()


class TestMessages:
    loops = {"sim": SimLoop}  # noqa: RUF012

    async def test_messages_arrive_in_order_and_whole(self, both: Both) -> None:
        both.a.send(1, b"one")
        both.a.send(2, b"two", b"payload", b"")
        both.b.send(3, b"back", LARGE[:70_000])
        await both.settle()
        assert both.b.messages == [(1, b"one", b""), (2, b"two", b"payload")]
        assert both.a.messages == [(3, b"back", LARGE[:70_000])]

    async def test_small_message_overtakes_a_large_payload(self, both: Both) -> None:
        both.line.other.handler.pause_writing()
        both.line.handler.pause_writing()
        both.a.send(1, b"large", LARGE)
        both.a.send(2, b"small")
        await both.settle()
        assert both.b.messages == [(2, b"small", b"")]
        both.line.handler.resume_writing()
        await both.settle()
        assert both.b.messages[1:] == [(1, b"large", LARGE)]

    async def test_first_message_of_a_turn_is_written_at_once(self, both: Both) -> None:
        both.a.connection.join(b"ahead ")
        assert not both.line.sent
        both.a.connection.post((b"first ",))
        assert both.line.sent == b"ahead first "
        both.a.connection.post((b"second ",))
        both.a.connection.join(b"third ")
        assert both.line.sent == b"ahead first "
        both.a.connection.push(b"now")
        assert both.line.sent == b"ahead first second third now"
        both.line.sent.clear()

    async def test_deferrable_bytes_are_written_in_next_turn(self, both: Both) -> None:
        both.a.connection.join(b"alone")
        await both.turn()
        assert both.line.sent == b"alone"
        both.line.sent.clear()

    async def test_held_bytes_are_written_with_next_message(self, both: Both) -> None:
        both.a.connection.hold(b"held ", 1.0)
        await both.turn()
        assert not both.line.sent
        both.a.connection.post((b"next ",))
        both.a.connection.hold(b"last")
        await both.turn()
        assert both.line.sent == b"held next last"
        both.line.sent.clear()

    async def test_held_bytes_are_written_when_their_time_is_over(
        self, both: Both
    ) -> None:
        both.a.connection.hold(b"with ")  # which has no limit
        both.a.connection.hold(b"long ", 3.0)
        both.a.connection.hold(b"short", 1.0)
        await asyncio.sleep(0.9)
        assert not both.line.sent
        await asyncio.sleep(0.2)
        assert both.line.sent == b"with long short"
        both.a.connection.hold(b" for ever")  # the time of the first is not its
        await asyncio.sleep(10.0)
        assert both.line.sent == b"with long short"
        both.line.sent.clear()

    async def test_message_with_pending_buffers_is_overtaken(self, both: Both) -> None:
        held = PendingBuffers([memoryview(b"of it")])
        both.a.connection.send(FrameKind.REQUEST, 1, buffers=held)
        both.a.send(2, b"next")
        await both.settle()
        assert both.b.messages == [(2, b"next", b"")]
        held.release()
        await both.settle()
        assert both.b.messages[1:] == [(1, b"", b"of it")]

    @pytest.mark.parametrize("is_held", [False, True])
    async def test_dropped_message_never_arrives(
        self, both: Both, *, is_held: bool
    ) -> None:
        both.line.handler.pause_writing()
        sent: list[bool] = []
        buffers = [memoryview(LARGE)]
        both.a.connection.send(
            FrameKind.REQUEST,
            1,
            buffers=PendingBuffers(buffers) if is_held else buffers,
            on_sent=lambda: sent.append(True),
        )
        assert not both.a.connection.drop(FrameKind.REQUEST, 2)
        assert both.a.connection.drop(FrameKind.REQUEST, 1)
        assert not both.a.connection.drop(FrameKind.REQUEST, 1)
        assert sent == [True]
        both.b.on_transfer_dropped = lambda *_: None  # type: ignore[method-assign]
        both.line.handler.resume_writing()
        await both.settle()
        assert both.b.messages == []

    async def test_malformed_bytes_end_connection_with_reason(self, both: Both) -> None:
        both.a.connection.stream.write_uncounted(b"x" * 40)
        await both.settle()
        assert "a frame begins with" in both.b.lost[0]
        assert b"it could not take what this worker sent" in both.line.other.sent
        assert both.b.broken == []


class TestTheEnd:
    loops = {"sim": SimLoop}  # noqa: RUF012

    async def test_orderly_close_delivers_earlier_messages(self, both: Both) -> None:
        both.a.send(1, b"last")
        both.a.connection.close("enough")
        await both.settle()
        assert both.b.messages == [(1, b"last", b"")]
        assert both.b.connection.peer_closed == "enough"
        assert (both.a.lost, both.a.broken) == (["None"], [])

    async def test_peer_that_closed_is_not_awaited_after_cut(self, both: Both) -> None:
        both.b.connection.on_peer_close("")
        await both.cut()
        assert (both.b.lost, both.b.broken) == (["cut"], [])
        assert both.b.connection.peer_closed == "it closed the connection"

    async def test_close_reason_may_come_after_the_break(self, both: Both) -> None:
        await both.cut()
        both.b.connection.on_peer_close("it was stopped")
        assert both.b.lost == ["it was stopped"]

    @pytest.mark.parametrize("way", ["fail", "end"])
    async def test_connection_ends_once_with_the_first_reason(
        self, both: Both, way: str
    ) -> None:
        end = getattr(both.a.connection, way)
        end(ClosedError("first"))
        end(ClosedError("second"))
        await both.turn()
        assert both.a.lost == ["first"]
        assert both.a.connection.state is ConnectionState.CLOSED

    async def test_message_sent_after_the_end_is_dropped(self, both: Both) -> None:
        held, waits = PendingBuffers([memoryview(b"x")]), []
        both.a.connection.send(
            FrameKind.REQUEST, 1, buffers=held, on_sent=lambda: waits.append("held")
        )
        both.line.handler.pause_writing()
        both.a.connection.send(
            FrameKind.REQUEST,
            2,
            buffers=[memoryview(LARGE)],
            on_sent=lambda: waits.append("large"),
        )
        both.a.connection.end(ClosedError("over"))
        assert waits == ["held", "large"]
        both.a.connection.send(
            FrameKind.REQUEST, 3, on_sent=lambda: waits.append("late")
        )
        assert waits[2:] == ["late"]
        both.a.connection.post((b"late",))
        with pytest.raises(ConnectionLostError, match="has ended"):
            await both.a.connection.writable()
        await both.a.connection.resumption.settled()


SCRIPT = (b"one", b"", b"three" * 9)


class TestResuming:
    loops = {"sim": SimLoop}  # noqa: RUF012

    async def play_cut(self, cut_a: int, cut_b: int, payload: bytes = b"") -> int:
        """Send the script both ways, with a cut after so many bytes of each.

        Returns:
            How many bytes there were one way.
        """
        both = await opened()
        a, b = both.a, both.b
        for call_id, control in enumerate(SCRIPT):
            a.send(call_id, control, payload)
            b.send(call_id, control, payload)
        await both.turn()
        total = len(both.line.sent)
        both.line.deliver(cut_a)
        both.line.other.deliver(cut_b)
        await both.cut()
        assert a.broken == b.broken == ["cut"]
        a.send(9, b"while it is broken")
        await both.resume()
        a.send(10, b"afterwards")
        await both.settle()
        script = [(at, head, payload) for at, head in enumerate(SCRIPT)]
        ends = [(9, b"while it is broken", b""), (10, b"afterwards", b"")]
        assert sorted(a.messages) == script, (cut_a, cut_b)
        assert sorted(b.messages) == script + ends, (cut_a, cut_b)
        assert a.lost == b.lost == []
        await both.end()
        return total

    async def test_cut_at_every_byte_loses_and_repeats_nothing(self) -> None:
        total = await self.play_cut(0, 0)
        for cut in range(total + 1):
            await self.play_cut(cut, total - cut)
            await self.play_cut(cut, cut)

    async def test_cut_inside_large_payloads_loses_and_repeats_nothing(self) -> None:
        payload = LARGE[:200_001]
        for cut in range(1, 610_000, 30_011):
            await self.play_cut(cut, cut // 2, payload)

    async def test_connection_may_break_again_before_anything_was_read(
        self, both: Both
    ) -> None:
        both.a.send(1, b"message")
        await both.turn()
        for _ in range(3):
            await both.cut()
            await both.resume()
            both.line.sent.clear()
        await both.cut()
        await both.resume()
        assert both.b.messages == [(1, b"message", b"")]

    async def test_due_ack_travels_with_the_next_message(self, both: Both) -> None:
        kept = both.b.connection.resumption.unacknowledged
        both.b.send(1, b"", bytes(ACK_BYTES - 41))  # a header and a length take 48
        await both.settle()
        both.b.send(2, b"")
        await both.settle()
        read = both.a.connection.received
        assert both.b.acks == []
        both.a.send(3, b"")
        await both.settle()
        assert both.b.acks == [read - 40]
        assert kept.nbytes == 40

    async def test_ack_is_sent_alone_if_another_is_due(self, both: Both) -> None:
        kept = both.b.connection.resumption.unacknowledged
        for call_id in (1, 2, 3):
            both.b.send(call_id, b"", bytes(ACK_BYTES))
            await both.settle()
        # Both went; the third waits again, for a message or for the next one.
        assert both.b.acks[1:] == [both.b.acks[0] + ACK_BYTES + 48]
        assert kept.nbytes == ACK_BYTES + 48

    async def test_waiting_ack_is_sent_on_request(self, both: Both) -> None:
        kept = both.b.connection.resumption.unacknowledged
        both.b.send(1, b"", bytes(ACK_BYTES))
        await both.settle()
        read = both.a.connection.received
        assert both.b.acks == []
        both.a.connection.acknowledge(100)
        await both.settle()
        assert both.b.acks == [read]
        assert kept.nbytes == 0

    async def test_received_bytes_are_acknowledged_on_request(self, both: Both) -> None:
        both.b.send(1, b"")
        await both.settle()
        both.a.connection.acknowledge(100)  # of so much there is no news
        await both.settle()
        assert both.b.acks == []
        both.a.connection.acknowledge()
        await both.settle()
        assert both.b.acks == [both.a.connection.received]

    async def test_ack_of_more_than_was_sent_is_refused(self, both: Both) -> None:
        with pytest.raises(MalformedError, match="were sent"):
            both.a.connection.on_ack(1 << 40)

    async def test_calls_still_unsent_are_known(self, both: Both) -> None:
        assert both.a.connection.first_unsent == NEVER
        both.a.next_call_id = 7
        await both.cut()
        assert both.a.connection.is_broken
        assert both.a.connection.first_unsent == 7
        await both.resume()
        assert not both.a.connection.is_broken
        assert both.a.connection.first_unsent == NEVER

    async def test_payloads_wait_for_a_transport_and_messages_do_not(
        self, both: Both
    ) -> None:
        await both.cut()
        both.a.send(1, b"large", LARGE)
        both.a.send(2, b"small")
        await both.resume()
        await both.settle()
        assert both.b.messages == [(2, b"small", b""), (1, b"large", LARGE)]

    async def test_resumed_connection_wakes_tasks_that_wait_for_it(
        self, both: Both
    ) -> None:
        await both.cut()
        waiting = asyncio.create_task(both.a.connection.resumption.settled())
        await both.turn()
        assert not waiting.done()
        await both.resume()
        await waiting

    async def test_silent_transport_is_replaced_and_delivers_nothing_more(
        self, both: Both
    ) -> None:
        both.b.send(1, b"late")
        await both.turn()
        old = both.line
        await both.resume()
        assert both.a.broken[0].endswith("another transport takes its place")
        assert old.is_ended
        assert both.a.messages == [(1, b"late", b"")]

    async def test_next_transport_takes_over_a_paused_reading(self, both: Both) -> None:
        both.a.connection.stream.pause_reading()
        await both.cut()
        await both.resume()
        assert not both.line.is_reading
        both.a.connection.stream.resume_reading()
        assert both.line.is_reading

    async def test_refused_resumption_ends_the_dialing_side(self, both: Both) -> None:
        await both.cut()
        both.b.refuses = True
        await both.resume()
        assert both.a.lost == [REFUSED]
        assert not both.a.connection.is_broken

    async def test_ended_connection_is_not_resumed(self, both: Both) -> None:
        await both.cut()
        both.b.connection.end(ClosedError("given up"))
        await both.resume()
        await both.settle()
        assert both.b.lost == ["given up"]
        assert both.b.connection.stream.transport is None

    async def test_peer_that_has_read_more_than_was_sent_is_refused(
        self, both: Both
    ) -> None:
        await both.cut()
        both.b.connection._receipts.received = 1 << 40  # noqa: SLF001  (it lies)
        await both.resume()
        await both.settle()
        assert "were sent" in both.a.lost[0]

    @pytest.mark.parametrize("way", ["close", "fail"])
    async def test_broken_connection_ends_in_the_turn_after_its_close(
        self, both: Both, way: str
    ) -> None:
        await both.cut()
        if way == "close":
            both.a.connection.close()
        else:
            both.a.connection.fail(ClosedError("enough"))
        assert not both.a.connection.is_broken
        with pytest.raises(ConnectionLostError, match="cannot be resumed"):
            both.a.connection.resumption.adopt(both.line, 0)
        await both.turn()
        assert both.a.lost == ["None" if way == "close" else "enough"]

    async def test_too_many_bytes_written_while_broken_end_the_connection(
        self, both: Both
    ) -> None:
        await both.cut()
        piece = memoryview(bytes(DISCONNECTED_BYTES_MAX // 4))
        for _ in range(5):
            both.a.connection.post((piece,))
            await both.turn()
        assert "bytes of messages wait" in both.a.lost[0]

    async def test_closing_connection_may_still_be_resumed(self, both: Both) -> None:
        both.b.connection.on_peer_close("soon")
        both.a.send(1, b"on its way")
        await both.turn()
        both.a.connection.resumption.break_off("silent")
        both.b.connection.resumption.break_off("silent")
        await both.resume()
        assert both.b.messages == [(1, b"on its way", b"")]
        await both.cut()
        assert both.b.lost == ["cut"]
