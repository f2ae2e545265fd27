"""What is wrong with calls and answers themselves: what is content, and what framing.

Content costs the call that it belongs to; broken framing ends the connection, and says
why.  One real worker sends frames over its own open link, without the code that would
never send them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from asyncrpc import AsyncRpcError, Options, Worker, WorkerLostError
from asyncrpc.core.calls.futures import CallFuture
from asyncrpc.core.links.link import Link
from asyncrpc.core.wire.frames import Flags, FrameKind, pack_head
from asyncrpc.errors import DecodeError
from asyncrpc.testing import Cluster
from tests.integration.core.company import calls_over

LIMIT_S = 30.0  # for what would otherwise hang
_release: asyncio.Event
Pair = tuple[Worker, Worker, Link]


async def hold() -> str:
    """Run until the test lets it end."""
    await _release.wait()
    return "held"


async def held_items() -> Any:
    yield 0
    await _release.wait()
    yield 1


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    """Give a worker that misbehaves, its victim, and the link between them."""
    global _release  # noqa: PLW0603  (of this test's loop)
    _release = asyncio.Event()
    options = Options(drain_timeout_s=2.0, rpc_timeout_s=LIMIT_S)
    async with Cluster(2, options=options) as (a, b):
        yield a, b, await a.parts.link_to("b")
        _release.set()


def send(
    link: Link, head: list[Any], control: bytes, kind: int = FrameKind.REQUEST
) -> CallFuture[Any]:
    """Send a request with a head as it is given; the future holds its answer."""
    call: CallFuture[Any] = CallFuture(loop=link.host.loop, function="it", to="b")
    call.call_id = link.pending.open(call)
    call.link = link
    link.connection.send(
        kind, call.call_id, aux=-1, head=pack_head(head), control=control
    )
    return call


def send_request(link: Link, head: list[Any], value: Any = None) -> CallFuture[Any]:
    encoded = link.host.codec.encode([[1, 2], {}] if value is None else value)
    return send(link, head, encoded.control)


NAMED = [0, "builtins:max"]
META = [
    {"m": 5},
    {"m": ["x", {}]},
    {"m": [1, 5]},
    {"d": 5},
    {"d": {"cuda:0": 7}},
    {"d": {"no such": "cpu"}},
    {"c": [1]},
    {"c": {"a": 1}},
    {"a": 5},
    {"a": [1]},
    {"a": ["x", "y", "z"]},
    {"a": [-1, 2**63, 1, 5]},
    {"r": 5},
    {"r": [1]},
    {"r": ["x", 1.5]},
    {"r": [7, 1]},  # in the name of another worker
    {"r": [-1, -1]},
]


@pytest.mark.parametrize("meta", META, ids=str)
async def test_wrong_meta_of_a_request_fails_only_it(
    pair: Pair, meta: dict[str, Any]
) -> None:
    a, b, link = pair
    held = asyncio.ensure_future(a.peer("b").call(hold))
    assert await a.peer("b").call(max, 1, 2) == 2
    for _ in range(2):
        with pytest.raises(AsyncRpcError) as caught:
            await asyncio.wait_for(send_request(link, [NAMED, meta]), LIMIT_S)
        assert not isinstance(caught.value, WorkerLostError)
    _release.set()
    assert await held == "held"
    assert await a.parts.link_to("b") is link
    assert not len(b.parts.directory.links[0].served)


@pytest.mark.parametrize(
    "target",
    [
        ["="],
        ["=", 1, 2],
        ["=", "x", "y", "z"],
        ["=", 1, 2, 3],
        ["=", 7, 1.5, "method"],
        ["?", 1],
        [],
        [0, "no name"],
        [0, "builtins:"],
        [0, "builtins:no_such"],
        None,
    ],
    ids=str,
)
async def test_invalid_target_is_answered_by_an_error(pair: Pair, target: Any) -> None:
    a, _, link = pair
    for _ in range(2):
        with pytest.raises(AsyncRpcError) as caught:
            await asyncio.wait_for(send_request(link, [target, None]), LIMIT_S)
        assert not isinstance(caught.value, WorkerLostError)
    assert await a.peer("b").call(max, 1, 2) == 2
    assert await a.parts.link_to("b") is link


@pytest.mark.parametrize("value", [5, [], [1], [[], []], [{}, []], [5, {}], {"a": 1}])
async def test_invalid_arguments_get_an_error(pair: Pair, value: Any) -> None:
    _, _, link = pair
    with pytest.raises(DecodeError, match="argument"):
        await send_request(link, [NAMED], value)


CONTROLS = [
    b"",
    b"\x00",
    b"\xff\xff\xff\x1f",
    b"\x00\x00\x00\x00\xc1",
    b"\x02\x00\x00\x00\x91\x05\xc0",  # an entry that is a number
    b"\x04\x00\x00\x00\x91\x92\x0d\x05\xc0",  # a reference that is a number
    b"\x00\x00\x00\x40",  # packed, in no way
    b"\x01\x00\x00\x40\x05",
    b"\x00\x00\x00\x00\xc7\x01\x63a",  # a code that nobody has
    bytes(4) + b"\x91" * 2000 + b"\xc0",
]


@pytest.mark.parametrize("control", CONTROLS, ids=range(len(CONTROLS)))
async def test_undecodable_value_costs_its_message_alone(
    pair: Pair, control: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """In a request, a service's, a notice, an answer, an error and an item."""
    a, b, link = pair
    for kind, head in (
        (FrameKind.REQUEST, [NAMED]),
        (FrameKind.SERVICE, ["membership", "find"]),
    ):
        with pytest.raises(DecodeError):
            await asyncio.wait_for(send(link, head, control, kind), LIMIT_S)
    link.connection.send(
        FrameKind.NOTICE, 0, head=pack_head(["rref", "release"]), control=control
    )
    back = await b.parts.link_to("a")
    for kind in (FrameKind.RESPONSE, FrameKind.ERROR):
        task = asyncio.ensure_future(a.peer("b").call(hold))
        assert await a.peer("b").call(max, 1, 2) == 2
        waiting = calls_over(link)[0].call_id
        back.connection.send(kind, waiting, control=control)
        with pytest.raises(DecodeError):
            await asyncio.wait_for(task, LIMIT_S)
    stream = a.peer("b").stream(held_items)
    assert await anext(stream) == 0
    waiting = calls_over(link)[0].call_id
    back.connection.send(
        FrameKind.STREAM_ITEM, waiting, head=pack_head([1, None]), control=control
    )
    with pytest.raises(DecodeError):
        await asyncio.wait_for(anext(stream), LIMIT_S)
    _release.set()
    assert await a.peer("b").call(max, 1, 2) == 2  # what was sent before has come
    assert await b.peer("a").call(max, 1, 2) == 2
    assert "could not be taken: rref.release" in caplog.text
    assert await a.parts.link_to("b") is link
    assert not calls_over(link)


@pytest.mark.parametrize(
    "meta",
    [{"l": 5}, {"l": ["x"]}, {"l": [999]}, {"l": [-1]}, {"o": 5}, {"o": []}, {"a": 5}],
    ids=str,
)
async def test_wrong_meta_keeps_the_answer(pair: Pair, meta: dict[str, Any]) -> None:
    """A value is not lost because loans are returned that were never made."""
    a, b, link = pair
    back = await b.parts.link_to("a")
    for kind in (FrameKind.RESPONSE, FrameKind.ERROR, FrameKind.STREAM_END):
        if kind == FrameKind.STREAM_END:
            stream = a.peer("b").stream(held_items)
            assert await anext(stream) == 0
            task = asyncio.ensure_future(anext(stream, "ended"))
        else:
            task = asyncio.ensure_future(a.peer("b").call(hold))
        assert await a.peer("b").call(max, 1, 2) == 2
        (waiting,) = calls_over(link)
        value: Any = "answered"
        if kind == FrameKind.ERROR:
            value = {"type": "builtins:ValueError", "message": "m"}
        back.connection.send(
            kind,
            waiting.call_id,
            aux=1,
            head=pack_head([meta]),
            control=back.host.codec.encode(value).control,
        )
        await asyncio.wait_for(asyncio.wait([task]), LIMIT_S)
        assert not isinstance(task.exception(), WorkerLostError)
        if kind == FrameKind.RESPONSE and "a" not in meta:
            assert task.result() == "answered"
        if kind == FrameKind.STREAM_END:
            assert task.result() == "ended"
    assert await a.peer("b").call(max, 1, 2) == 2
    assert await a.parts.link_to("b") is link


class Stop(SystemExit):
    """Ends a process, if it is let."""


def stop() -> None:
    raise Stop("by a value's own code")


class Stopping:
    """A value whose own code would end whoever reads it."""

    def __reduce__(self) -> Any:
        return stop, ()


async def test_notice_that_would_end_the_process_is_dropped(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    a, _, link = pair
    control = link.host.codec.encode([Stopping()]).control  # a notice has no pickle
    head = pack_head(["rref", "release"])
    link.connection.send(FrameKind.NOTICE, 0, head=head, control=control)
    assert await a.peer("b").call(max, 1, 2) == 2
    assert "could not be taken: rref.release" in caplog.text
    assert await a.parts.link_to("b") is link


# --- framing -------------------------------------------------------------------------

CREATED = pack_head([[5, 6]])
FRAMES: dict[str, dict[str, Any]] = {
    "no such kind": {"kind": 99},
    "a HELLO": {"kind": FrameKind.HELLO},
    "no head": {"kind": FrameKind.REQUEST, "head": b""},
    "a head of no msgpack": {"kind": FrameKind.REQUEST, "head": b"\xc1"},
    "a head that is no array": {"kind": FrameKind.REQUEST, "head": b"\x05"},
    "a target that is no target": {"kind": FrameKind.REQUEST, "head": b"\x91\xa1x"},
    "a number never given": {"kind": FrameKind.REQUEST, "head": b"\x91\xcd\x03\xe7"},
    "a name that is no text": {"kind": FrameKind.REQUEST, "head": CREATED},
    "no map beside it": {"kind": FrameKind.REQUEST, "head": pack_head([NAMED, [1]])},
    "a service without a method": {"kind": FrameKind.SERVICE, "head": b"\x91\xa1x"},
    "a notice without a head": {"kind": FrameKind.NOTICE, "head": b""},
    "an answer to no call": {"kind": FrameKind.RESPONSE, "call_id": 999},
    "an error of no call": {"kind": FrameKind.ERROR, "call_id": 999},
    "an item of no call": {"kind": FrameKind.STREAM_ITEM, "call_id": 999},
    "an end of no call": {"kind": FrameKind.STREAM_END, "call_id": 999},
    "a negative credit": {"kind": FrameKind.CREDIT, "aux": -1},
    "a credit of nothing": {"kind": FrameKind.CREDIT, "aux": 0},
    "a negative want": {"kind": FrameKind.WANT, "call_id": 5, "aux": -1},
    "a want of no call": {"kind": FrameKind.WANT, "call_id": 0, "aux": 1},
    "a credit of a stream": {"kind": FrameKind.STREAM_CREDIT, "aux": -1},
    "more read than was sent": {"kind": FrameKind.ACK, "call_id": 0, "aux": 1 << 60},
    "lanes without end": {"kind": FrameKind.LANES, "aux": 1 << 20},
    "a lane to dial again": {"kind": FrameKind.LANE_BROKEN, "call_id": 5},
    "what was never lent": {"kind": FrameKind.FREE, "call_id": 1 << 50},
    "a drop of nothing": {"kind": FrameKind.DROP, "call_id": 1 << 40},
    "a deferred nothing": {"kind": FrameKind.REQUEST, "flags": Flags.DEFERRED},
}


@pytest.mark.parametrize("name", FRAMES)
async def test_broken_framing_ends_the_connection_with_a_reason(
    pair: Pair, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    a, _, link = pair
    task = asyncio.ensure_future(a.peer("b").call(hold))
    assert await a.peer("b").call(max, 1, 2) == 2
    frame = dict(FRAMES[name])
    link.connection.send(frame.pop("kind"), frame.pop("call_id", 1000), **frame)
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(task, LIMIT_S)
    assert "broke the protocol" in caplog.text
    _release.set()
    assert await a.peer("b").call(max, 1, 2) == 2  # by another connection


@pytest.mark.parametrize(
    ("function", "kind", "head"),
    [
        (hold, FrameKind.STREAM_ITEM, [0, None]),
        (hold, FrameKind.STREAM_END, []),
        (held_items, FrameKind.RESPONSE, []),
        (held_items, FrameKind.STREAM_ITEM, [0, None]),  # for the second time
        (held_items, FrameKind.STREAM_ITEM, [-5, None]),
        (held_items, FrameKind.STREAM_END, []),  # of fewer items than have come
        (held_items, FrameKind.ERROR, []),
    ],
)
async def test_answer_of_a_wrong_kind_ends_the_wait(
    pair: Pair, function: Any, kind: FrameKind, head: list[Any]
) -> None:
    """The caller does not wait for a right answer."""
    a, b, link = pair
    back = await b.parts.link_to("a")
    if function is hold:
        task = asyncio.ensure_future(a.peer("b").call(function))
    else:
        stream = a.peer("b").stream(function)
        assert await anext(stream) == 0
        task = asyncio.ensure_future(anext(stream))
    assert await a.peer("b").call(max, 1, 2) == 2
    (waiting,) = calls_over(link)
    control = back.host.codec.encode(None).control
    aux = -1 if kind == FrameKind.ERROR else 0
    back.connection.send(
        kind, waiting.call_id, aux=aux, head=pack_head(head), control=control
    )
    with pytest.raises(WorkerLostError):
        await asyncio.wait_for(task, LIMIT_S)
    _release.set()
    assert await a.peer("b").call(max, 1, 2) == 2
