"""A connection reads in turns, and writes in order, as much as its loop allows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
import uvloop

from asyncrpc.core.calls.reading_turns import TURN_MESSAGES, TURN_S, ReadingTurns
from asyncrpc.core.transport.byte_stream import ByteStream
from asyncrpc.core.wire.frames import FrameKind, prefix
from asyncrpc.core.wire.reader import FrameReader
from asyncrpc.errors import MalformedError
from tests.unit.core.wire.recorder import Recorder

PING = prefix(FrameKind.PING, 9)


class FakeLoop:
    """A loop whose time goes on by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.soon: list[Callable[[], object]] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback: Callable[[], object]) -> None:
        self.soon.append(callback)

    def turn(self) -> None:
        soon, self.soon = self.soon, []
        for callback in soon:
            callback()


class SlowRecorder(Recorder):
    """A sink that takes its time for each message."""

    def __init__(self, loop: FakeLoop, message_s: float) -> None:
        super().__init__()
        self.loop, self.message_s = loop, message_s

    def on_message(self, *parts: Any) -> None:
        super().on_message(*parts)
        self.loop.now_s += self.message_s


class FakeStream:
    """Whether the transport reads."""

    reads = True

    def pause_reading(self) -> None:
        self.reads = False

    def resume_reading(self) -> None:
        self.reads = True


class Setting:
    """A reader, its turns, and what they act on."""

    def __init__(self, message_s: float = 0.0) -> None:
        self.loop, self.stream = FakeLoop(), FakeStream()
        self.sink = SlowRecorder(self.loop, message_s)
        self.frames: FrameReader = self.sink.reader()
        self.errors: list[Exception] = []
        self.turns = ReadingTurns(
            self.frames,
            cast("ByteStream", self.stream),
            cast("asyncio.AbstractEventLoop", self.loop),
            self.errors.append,
        )

    def read(self, stream: bytes) -> None:
        """Have bytes arrive in one read."""
        place = self.frames.get_buffer()
        place[: len(stream)] = stream
        self.frames.advance(len(stream))

    @property
    def taken(self) -> int:
        return len(self.sink.messages)


@pytest.mark.parametrize("count", [40, 400, 4000])
def test_turn_takes_no_more_messages_than_its_time_allows(count: int) -> None:
    setting = Setting(message_s=TURN_S / 10)
    setting.read(PING * count)
    most, before = setting.taken, setting.taken
    while setting.loop.soon:
        assert not setting.stream.reads
        setting.loop.turn()
        most, before = max(most, setting.taken - before), setting.taken
    assert setting.taken == count
    assert setting.stream.reads
    # The last KiB is taken at once: an honest peer's few messages need no clock.
    assert most <= 10 + (1 << 10) // len(PING)


def test_quick_messages_are_taken_many_in_a_turn() -> None:
    setting = Setting()
    setting.read(PING * 4000)
    while setting.loop.soon:
        before = setting.taken
        setting.loop.turn()
        assert setting.taken - before <= TURN_MESSAGES + (1 << 10) // len(PING)
    assert setting.taken == 4000


def test_held_stream_neither_reads_nor_parses() -> None:
    setting = Setting()
    setting.turns.hold()
    assert not setting.stream.reads
    setting.turns.hold()
    setting.turns.resume()
    assert not setting.stream.reads
    setting.turns.resume()
    assert setting.stream.reads
    setting.read(PING)
    assert setting.taken == 1


def test_bytes_before_the_hold_are_parsed_at_its_end() -> None:
    setting = Setting()
    on_message = setting.sink.on_message

    def hold_first(*parts: Any) -> None:
        on_message(*parts)
        if setting.taken == 1:
            setting.turns.hold()

    setting.sink.on_message = hold_first  # type: ignore[method-assign]
    setting.read(PING * 3)
    assert setting.taken == 1
    setting.turns.resume()
    assert setting.taken == 3
    assert setting.stream.reads


def test_error_in_a_later_turn_ends_the_connection() -> None:
    setting = Setting(message_s=TURN_S)
    setting.read(PING * 100 + b"garbage" * 10)
    while setting.loop.soon and not setting.errors:
        setting.loop.turn()
    (error,) = setting.errors
    assert isinstance(error, MalformedError)
    assert setting.taken == 100


class Sent:
    """A transport and a poller that write down what they are asked."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.waits = 0

    def send(self, parts: Sequence[bytes]) -> None:
        self.writes.append(b"".join(parts))

    def read(self) -> None: ...

    def wait(self, *, is_for_answer: bool) -> None:
        del is_for_answer
        self.waits += 1


def stream_to(sent: Sent) -> ByteStream:
    fake: Any = sent
    stream = ByteStream(asyncio.get_running_loop(), fake)
    stream.transport = fake
    return stream


async def turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_loop_polls_after_a_message() -> None:
    sent = Sent()
    stream_to(sent).write((b"call",))
    await turn()
    assert (sent.writes, sent.waits) == ([b"call"], 1)


async def test_loop_does_not_poll_after_a_sign_of_life() -> None:
    sent = Sent()
    stream_to(sent).write_apart(b"ping")
    await turn()
    assert (sent.writes, sent.waits) == ([b"ping"], 0)


async def test_sign_of_life_joins_the_writes_of_its_turn() -> None:
    sent = Sent()
    stream = stream_to(sent)
    for message in (b"one ", b"two "):
        stream.write((message,))
    stream.write_apart(b"ping ")
    stream.write((b"three",))
    await turn()
    assert (sent.writes, sent.waits) == ([b"one ", b"two ping three"], 1)


async def test_deferrable_bytes_precede_a_sign_of_life() -> None:
    sent = Sent()
    stream = stream_to(sent)
    stream.join(b"ack ")
    stream.write_apart(b"ping")
    await turn()
    assert (sent.writes, sent.waits) == ([b"ack ping"], 0)


def test_barely_deferrable_bytes_are_written_in_the_next_turn() -> None:
    async def hold() -> list[bytes]:
        sent, written = Sent(), asyncio.Event()
        stream = stream_to(sent)
        stream.keep = lambda _: written.set()
        stream.hold(b"long ", 100.0)
        stream.hold(b"first ", 1e-9)  # uvloop has no timer for that
        stream.hold(b"second", 1e-9)
        await written.wait()
        return sent.writes

    assert uvloop.run(hold()) == [b"long first second"]


async def test_written_bytes_are_kept_for_a_resend() -> None:
    sent, kept = Sent(), list[bytes | memoryview]()
    stream = stream_to(sent)
    stream.keep = kept.extend
    stream.write_apart(b"ping")
    assert kept == [b"ping"]
