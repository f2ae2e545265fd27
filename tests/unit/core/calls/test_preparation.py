"""Messages that are packed: delivered once they are unpacked, or why they cannot be."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asyncrpc.core.calls.preparation import UNPACKING_BYTES_MAX
from asyncrpc.core.serde import compression_named, is_packed
from asyncrpc.core.wire.frames import FrameKind, pack_head
from asyncrpc.errors import MalformedError, OverloadedError
from tests.unit.core.calls.fakes import Parts

SMALL, LARGE = 1 << 10, 64 << 10  # elements; the second is unpacked in a thread


class Box:
    """Takes what is delivered."""

    def __init__(self) -> None:
        self.messages: list[tuple[bytes, list[memoryview]]] = []

    def deliver(self, control: bytes, buffers: list[memoryview]) -> None:
        self.messages.append((control, buffers))


def packed(link: Parts, codec: str, size: int) -> tuple[bytes, list[memoryview]]:
    compression = compression_named(codec)
    assert compression is not None
    encoded = link.host.codec.encode_for(compression, [torch.zeros(size)]).pack()
    return encoded.control, [memoryview(bytes(buffer)) for buffer in encoded.buffers]


def take(
    link: Parts, size: int, box: Box, *, call_id: int = 1, spoil: bool = False
) -> None:
    control, buffers = packed(link, "bf16", size)
    if spoil:
        buffers = [buffer[:-2] for buffer in buffers]
    link.preparation.take(
        FrameKind.REQUEST,
        call_id,
        control,
        buffers,
        head=pack_head([[4, "m:f"], None]),
        deliver=box.deliver,
    )


def value_in(link: Parts, box: Box) -> Any:
    ((control, buffers),) = box.messages
    return link.host.codec.decode(control, buffers)


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_packed_message_is_delivered_unpacked(link: Parts, size: int) -> None:
    box = Box()
    take(link, size, box)
    assert bool(box.messages) == (size == SMALL)
    link.host.pool.run()
    (tensor,) = value_in(link, box)
    assert torch.equal(tensor, torch.zeros(size))


@pytest.mark.parametrize("size", [SMALL, LARGE])
def test_corrupt_packed_message_is_delivered_as_it_is(link: Parts, size: int) -> None:
    box = Box()
    take(link, size, box, spoil=True)
    link.host.pool.run()
    ((control, buffers),) = box.messages
    assert is_packed(control)
    assert buffers == []


def test_request_cancelled_during_unpacking_is_not_delivered(link: Parts) -> None:
    """But its function has been named."""
    box = Box()
    take(link, LARGE, box)
    assert link.preparation.cancel(1)
    link.host.pool.run()
    assert box.messages == []
    assert link.heads.functions.name_of(4) == "f"


def test_delivered_request_cannot_be_cancelled_any_more(link: Parts) -> None:
    box = Box()
    take(link, LARGE, box)
    link.host.pool.run()
    assert not link.preparation.cancel(1)
    assert len(box.messages) == 1


def test_lost_link_delivers_no_unpacked_message(link: Parts) -> None:
    box = Box()
    take(link, LARGE, box)
    link.status.on_lost("a cable")
    link.host.pool.run()
    assert box.messages == []


def test_unpacking_messages_of_a_peer_are_limited(link: Parts) -> None:
    box = Box()
    fit = UNPACKING_BYTES_MAX // (4 * LARGE)
    for call_id in range(fit + 2):
        assert link.connection.turns.holds == (call_id > fit)
        take(link, LARGE, box, call_id=call_id)
    assert not box.messages
    assert link.connection.turns.holds == 1  # until there is room
    while len(box.messages) < fit + 2:
        link.host.pool.run()
    assert not link.connection.turns.holds


def test_message_over_the_limit_is_unpacked_alone(link: Parts) -> None:
    box = Box()
    for call_id in range(2):
        take(link, UNPACKING_BYTES_MAX // 4 + 1, box, call_id=call_id)
    assert link.connection.turns.holds == 1
    link.host.pool.run()
    assert not link.connection.turns.holds
    link.host.pool.run()
    assert len(box.messages) == 2


def test_lost_link_unpacks_no_more(link: Parts) -> None:
    box = Box()
    for call_id in range(3):
        take(link, UNPACKING_BYTES_MAX // 4 + 1, box, call_id=call_id)
    link.status.on_lost("a cable")
    link.host.pool.run()
    link.host.pool.run()
    assert box.messages == []


def test_worker_without_threads_unpacks_on_its_loop(link: Parts) -> None:
    box = Box()
    link.host.pool.are_closed = True
    take(link, LARGE, box)
    assert len(box.messages) == 1


def zeros(link: Parts) -> tuple[bytes, list[memoryview], int]:
    """Return a packed message that becomes far more, and how much more."""
    control, buffers = packed(link, "zstd", LARGE)
    return control, buffers, link.host.codec.open(control, buffers).expansion_bytes


def test_unpacked_request_counts_for_its_peer(link: Parts) -> None:
    control, buffers, expansion = zeros(link)
    memory, credit, box = link.credit.memory, link.credit, Box()
    memory.limit_bytes = 3 * expansion

    def take_zeros(call_id: int) -> None:
        credit.account.window += 4 * LARGE
        credit.on_arrived(call_id, control, buffers)
        link.preparation.take(
            FrameKind.REQUEST,
            call_id,
            control,
            list(buffers),
            head=pack_head([[4, "m:f"], None]),
            deliver=box.deliver,
        )

    for call_id in (1, 2, 3):
        take_zeros(call_id)
        assert memory.held_bytes == call_id * expansion  # before it is unpacked
    take_zeros(4)
    ((refused, nothing),) = box.messages
    with pytest.raises(OverloadedError, match=r"LimitOptions\.peer_bytes_max"):
        link.messages.decode(refused, nothing, {})
    claim = credit.claim(1, control, buffers)
    assert claim is not None
    claim.let_go()
    assert memory.held_bytes == 2 * expansion
    credit.on_cancel(2, 0)
    assert memory.held_bytes == expansion
    link.status.on_lost("a cable")
    credit.close()
    assert memory.held_bytes == 0


@pytest.mark.parametrize("kind", [FrameKind.SERVICE, FrameKind.NOTICE])
def test_service_messages_are_never_packed(link: Parts, kind: FrameKind) -> None:
    control, buffers, _ = zeros(link)
    with pytest.raises(MalformedError, match=f"a packed {kind.name}"):
        link.preparation.take(
            kind, 0, control, buffers, head=b"", deliver=Box().deliver
        )


def test_refused_message_ends_the_connection(link: Parts) -> None:
    class Refusing(Box):
        def deliver(self, control: bytes, buffers: list[memoryview]) -> None:
            raise MalformedError("no such call")

    take(link, LARGE, Refusing())
    link.host.pool.run()
    assert isinstance(link.connection.failed, MalformedError)
