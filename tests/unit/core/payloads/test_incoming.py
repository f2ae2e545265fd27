"""A response lands in the memory that its caller has claimed for it, if it fits."""

from __future__ import annotations

import pytest

from asyncrpc.core.payloads.incoming import IncomingPayloads
from asyncrpc.core.payloads.receive_pool import fresh
from asyncrpc.core.wire.frames import FrameKind
from asyncrpc.core.wire.limits import MessageLimits


class Nobody:
    def on_message(self, *_message: object) -> None:
        raise AssertionError

    def on_transfer_dropped(self, kind: int, call_id: int) -> None:
        raise AssertionError


def incoming_with(nbytes: int) -> tuple[IncomingPayloads, memoryview]:
    incoming = IncomingPayloads(Nobody(), MessageLimits(), fresh)
    claimed = memoryview(bytearray(nbytes))
    incoming.claim(7, claimed)
    return incoming, claimed


class TestClaims:
    def test_single_buffer_of_the_response_lands_in_the_claim(self) -> None:
        incoming, claimed = incoming_with(10)
        assert incoming.allocate(FrameKind.RESPONSE, 7, (10,))[0] is claimed

    @pytest.mark.parametrize(
        ("kind", "call_id", "lengths"),
        [
            (FrameKind.RESPONSE, 8, (10,)),
            (FrameKind.REQUEST, 7, (10,)),
            (FrameKind.ERROR, 7, (10,)),
            (FrameKind.RESPONSE, 7, (9,)),
            (FrameKind.RESPONSE, 7, (11,)),
            (FrameKind.RESPONSE, 7, (5, 5)),
            (FrameKind.RESPONSE, 7, (10, 0)),
        ],
    )
    def test_other_messages_do_not_land_in_the_claim(
        self, kind: int, call_id: int, lengths: tuple[int, ...]
    ) -> None:
        incoming, claimed = incoming_with(10)
        buffers = incoming.allocate(kind, call_id, lengths)
        assert [buffer.nbytes for buffer in buffers] == list(lengths)
        assert all(buffer is not claimed for buffer in buffers)

    def test_released_claim_is_not_used(self) -> None:
        incoming, claimed = incoming_with(10)
        incoming.release_claim(7)
        assert incoming.allocate(FrameKind.RESPONSE, 7, (10,))[0] is not claimed
