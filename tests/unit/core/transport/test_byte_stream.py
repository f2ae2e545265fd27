"""What a connection writes, in which order, and for what its loop polls."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import uvloop

from asyncrpc.core.transport.byte_stream import ByteStream


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
